"""Family `ngram`: prompt lookup as a drafter. It guesses what followed the text's ending before; no weights.

Every ending of `longest` down to `shortest` tokens is looked up in the request's own text up to the node, and
in a corpus where there is one. The counts of what followed are blended from the longest ending to the
shortest, each leaving to the next the probability of something new (prediction by partial matching, method C:
Moffat 1990). What no ending has seen is left over: a node with nothing to say guesses with next to no
probability.

Shape letters: R rows, C tokens that any row's ending was followed by, N tokens of the corpus.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from foredraft.infer.drafter_card import DrafterCard, StateNeeds
from foredraft.infer.drafters import Candidates, Drawn, Step
from foredraft.infer.drafters.paged import LAW_WIDTH, PagedDrafter, best_candidates
from foredraft.infer.paged_steps import PagedSteps
from foredraft.infer.params import EngineConfig
from foredraft.infer.sampler import greedy
from foredraft.infer.step_plan import StepPlan
from foredraft.kernels import dispatch
from foredraft.kernels.draws import Draw

CONFIG_FILE, CORPUS_FILE = "config.json", "model.safetensors"
MAX_FOLLOWERS = 256  # of one ending in the corpus: the nearest in its order stand for all
NOTHING = 1e-6  # probability of a guess without any grounds


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramConfig:
    """Content of config.json."""

    longest: int
    shortest: int
    max_positions: int  # of the target
    model_type: str = "foredraft_ngram"

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest <= 8:
            raise ValueError(
                f"expected 1 <= shortest <= longest <= 8, got {self.shortest} and {self.longest}"
            )


class Corpus:
    """Tokens with a table of their positions, ordered by the tokens that lie there.

    Args:
        tokens_N: int32; texts one after another.
        order_N: int32, from `sort_positions`.
    """

    def __init__(self, tokens_N: np.ndarray, order_N: np.ndarray) -> None:
        self.tokens_N, self.order_N = tokens_N, order_N

    def followers(self, ending: Sequence[int]) -> list[int]:
        """What followed an ending, at most MAX_FOLLOWERS of it."""
        wanted, size = list(ending), len(ending)

        def at(position: int) -> list[int]:
            return self.tokens_N[position : position + size].tolist()

        first = bisect_left(self.order_N, wanted, key=at)
        end = bisect_right(self.order_N, wanted, lo=first, hi=len(self.order_N), key=at)
        step = max(1, -(-(end - first) // MAX_FOLLOWERS))
        places_F = self.order_N[first:end:step] + size
        return self.tokens_N[places_F[places_F < len(self.tokens_N)]].tolist()


def sort_positions(tokens_N: np.ndarray, longest: int) -> np.ndarray:
    """Positions in the order of the `longest` tokens from there on, int32 [N]."""
    padded = np.concatenate([tokens_N, np.full(longest, -1, tokens_N.dtype)])
    columns = [padded[shift : shift + len(tokens_N)] for shift in range(longest)]
    return np.lexsort(columns[::-1]).astype(np.int32)


class NgramDrafter(PagedDrafter):
    """Keeps the tokens themselves where other families keep keys and values."""

    def __init__(
        self, config: NgramConfig, corpus: Corpus | None, engine: EngineConfig, max_depth: int
    ) -> None:
        steps = PagedSteps({}, config.max_positions, torch.float32, torch.device("cpu"), engine)
        super().__init__(steps, None, max_depth, StateNeeds())
        self.config, self.corpus = config, corpus
        self.tokens_of_slots = np.zeros(self.pool.num_pages * self.pool.page_size, np.int64)

    def prefill(self, step: Step) -> None:
        """Keep the tokens of a chunk."""
        for source, destination in step.moves:
            self.tokens_of_slots[destination] = self.tokens_of_slots[source]
        plan = step.plan
        self.tokens_of_slots[plan.write_slots[: plan.num_rows]] = plan.tokens[: plan.num_rows]

    def expand(self, step: Step, draws: Sequence[Draw], fan_out: int) -> Candidates:
        """Keep the rows' tokens and guess after the last of them."""
        logits_RC, token_ids_C, log_seen_R = self._lookup(step, len(draws), fan_out)
        return _scaled(best_candidates(logits_RC, draws, fan_out, token_ids_C), log_seen_R)

    def expand_and_draw(
        self, step: Step, draws: Sequence[Draw], fan_out: int, factor: float
    ) -> tuple[Candidates, Drawn]:
        """Keep the rows' tokens; the most probable ones and a drawn guess after the last of them."""
        logits_RC, token_ids_C, log_seen_R = self._lookup(step, len(draws), fan_out)
        drawn = dispatch.saguaro(logits_RC, draws, LAW_WIDTH, fan_out, factor, token_ids_C)
        candidates = best_candidates(logits_RC, [greedy(draw) for draw in draws], fan_out, token_ids_C)
        return _scaled(candidates, log_seen_R), Drawn(*(tensor.numpy() for tensor in drawn))

    def logits(self, step: Step, num_rows: int) -> torch.Tensor:
        """Of the tokens that were found; which these are differs from step to step."""
        return self._lookup(step, num_rows, 1)[0]

    def _lookup(
        self, step: Step, num_rows: int, fan_out: int
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Log-probabilities [R, C] of what was found, its tokens [C], log of each row's share seen [R]."""
        self.prefill(step)
        plan = step.plan
        rows = [self.blend(self.context(plan, row)) for row in range(plan.num_rows - num_rows, plan.num_rows)]
        found = sorted(set().union(*rows))
        # as many columns as candidates: the rest can never be drawn
        token_ids = found + [token for token in range(fan_out + len(found)) if token not in set(found)]
        token_ids = sorted(token_ids[: max(fan_out, len(found))])
        columns = {token: column for column, token in enumerate(token_ids)}
        logits_RC = torch.full((num_rows, len(token_ids)), -torch.inf)
        for row, probs in enumerate(rows):
            places = [columns[token] for token in probs]
            logits_RC[row, places] = torch.tensor(list(probs.values())).log()
        log_seen_R = np.log(np.array([sum(probs.values()) for probs in rows], np.float32))
        return logits_RC, torch.tensor(token_ids), log_seen_R

    def context(self, plan: StepPlan, row: int) -> np.ndarray:
        """Tokens up to a row of a plan, its own last, int64."""
        seq, page_size = plan.row_seq[row], self.pool.page_size
        positions = np.arange(plan.row_prefix[row])
        prefix_slots = plan.pages[seq][positions // page_size] * page_size + positions % page_size
        bits = np.unpackbits(plan.row_ancestors[row].view(np.uint8), bitorder="little").astype(bool)
        slots = np.concatenate([prefix_slots, plan.suffix_slots[seq][bits]])
        return self.tokens_of_slots[slots]

    def blend(self, context: np.ndarray) -> dict[int, float]:
        """Probability of every token that followed some ending of a text; never empty."""
        probs: dict[int, float] = {}
        left = 1.0
        for size in range(min(self.config.longest, len(context) - 1), self.config.shortest - 1, -1):
            counts = Counter(self._followers(context, size))
            if not counts:
                continue
            total, num_distinct = counts.total(), len(counts)
            for token, count in counts.items():
                probs[token] = probs.get(token, 0.0) + left * count / (total + num_distinct)
            left *= num_distinct / (total + num_distinct)
        return probs or {int(context[-1]): NOTHING}

    def _followers(self, context: np.ndarray, size: int) -> list[int]:
        ending = context[len(context) - size :]
        starts = np.flatnonzero(context[: len(context) - size] == ending[0])
        for shift in range(1, size):
            starts = starts[context[starts + shift] == ending[shift]]
        own = context[starts + size].tolist()
        return own + (self.corpus.followers(ending.tolist()) if self.corpus is not None else [])


def _scaled(candidates: Candidates, log_seen_R: np.ndarray) -> Candidates:
    """Candidates whose probabilities leave room for tokens that were not found."""
    shift_R1 = log_seen_R[:, None]
    return Candidates(
        token_ids_RF=candidates.token_ids_RF,
        scores_RF=candidates.scores_RF + shift_R1,
        log_probs_RF=candidates.log_probs_RF + shift_R1,
        entropy_R=candidates.entropy_R,
    )


def save(folder: Path, config: NgramConfig, tokens_N: np.ndarray) -> None:
    """Write config.json and the corpus, which may be empty."""
    (folder / CONFIG_FILE).write_text(json.dumps(asdict(config), indent=2) + "\n")
    tokens_N = tokens_N.astype(np.int32)
    order_N = sort_positions(tokens_N, config.longest)
    save_file({"tokens": tokens_N, "order": order_N}, folder / CORPUS_FILE)


def load(source: str, card: DrafterCard | None, config: EngineConfig) -> NgramDrafter:
    """Load the family from a folder; ValueError where its files do not fit together."""
    assert card is not None, "a folder without a card is of family lm"
    sizes = NgramConfig(**json.loads((Path(source) / CONFIG_FILE).read_text()))
    arrays = load_file(Path(source) / CORPUS_FILE)
    corpus = Corpus(arrays["tokens"], arrays["order"]) if len(arrays["tokens"]) else None
    return NgramDrafter(sizes, corpus, config, card.max_depth)
