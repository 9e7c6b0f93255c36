"""Steps on the paged pool: against transformers' own attention, and bit for bit against each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from foredraft.infer.paged_model import PagedModel
from foredraft.infer.params import EngineConfig
from foredraft.infer.step_plan import Row

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
FAMILIES = [
    pytest.param(Gemma2ForCausalLM, Gemma2Config(**DENSE, sliding_window=20), id="gemma2-window-softcap"),
    pytest.param(Qwen3ForCausalLM, Qwen3Config(**DENSE), id="qwen3"),
    pytest.param(
        GPT2LMHeadModel, GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=512), id="gpt2"
    ),
]


def random_tokens(count: int, vocab_size: int = 97, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_tree_step_equals_transformers_on_each_branch(family: type, config: object, tmp_path: Path) -> None:
    """A prefix with two branches, packed with a second sequence, against each path alone."""
    torch.manual_seed(0)
    reference = family(config).eval()
    reference.save_pretrained(tmp_path)
    model = PagedModel.load(str(tmp_path), EngineConfig(num_pages=16))
    prompt, other = random_tokens(130), random_tokens(70, seed=1)
    first, second = model.pool.begin(), model.pool.begin()
    torch.testing.assert_close(model.prefill(first, prompt), alone(reference, prompt), atol=2e-5, rtol=0)
    model.prefill(second, other)
    left, right, below = model.pool.append(first, [None, None, -1]).nodes
    tokens = [5, 6, 7]
    logits_RV = model.step(
        [
            Row(first, tokens[0], left),
            Row(second, 9),
            Row(first, tokens[1], right),
            Row(first, tokens[2], below),
        ]
    )
    paths = [[*prompt, 5], [*other, 9], [*prompt, 6], [*prompt, 5, 7]]
    for row_V, path in zip(logits_RV, paths, strict=True):
        torch.testing.assert_close(row_V, alone(reference, path), atol=2e-5, rtol=0)


@torch.inference_mode()
def alone(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize(("family", "config"), FAMILIES)
@pytest.mark.parametrize("num_places", [8, 2])
def test_a_packed_prefill_equals_transformers_on_each_prompt(
    family: type, config: object, num_places: int, tmp_path: Path
) -> None:
    """Prompts that end within, at and after a split, one going on from a prefix, in steps of 128 rows."""
    torch.manual_seed(0)
    reference = family(config).eval()
    reference.save_pretrained(tmp_path)
    model = PagedModel.load(str(tmp_path), EngineConfig(num_pages=32, prefill_chunk=128))
    model.prefill_places = num_places
    prompts = [random_tokens(count, seed=count) for count in (150, 64, 3, 1, 90)]
    runs = [(model.pool.begin(), prompt) for prompt in prompts]
    model.prefill(runs[0][0], prompts[0][:40])
    runs[0] = (runs[0][0], prompts[0][40:])
    before = model.num_prefill_chunks
    logits_NV = model.prefill_packed(runs)
    expected_NV = torch.stack([alone(reference, prompt) for prompt in prompts])
    torch.testing.assert_close(logits_NV, expected_NV, atol=2e-5, rtol=0)
    if num_places == 8:
        assert model.num_prefill_chunks - before == -(-(110 + 64 + 3 + 1 + 90) // 128), "every step is full"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_neighbours_or_commits(tiny_target: Path, dtype: str) -> None:
    """One row a step, chains, branching blocks and packed sequences give the same bits at every position."""
    model = PagedModel.load(str(tiny_target), EngineConfig(dtype=dtype, num_pages=64))
    tokens = random_tokens(260, 320)
    start = 50  # rounds cross three splits and four pages
    plain, tree, neighbour = (model.pool.begin() for _ in range(3))
    for seq in (plain, tree):
        model.prefill(seq, tokens[:start])
    model.prefill(neighbour, tokens[:111])
    expected = [model.step([Row(plain, token)])[0] for token in tokens[start:]]

    position, size = start, 0
    while position < len(tokens):
        size = size % 5 + 1
        chain = tokens[position : position + size]
        parents = [None, *(-1 - i for i in range(len(chain) - 1)), *[None] * (7 - len(chain))]
        nodes = model.pool.append(tree, parents).nodes
        decoys = [(token + 1) % 320 for token in chain[:1]] * (7 - len(chain))
        rows = [Row(tree, token, node) for token, node in zip([*chain, *decoys], nodes, strict=True)]
        rows.insert(3, Row(neighbour, position % 320))  # another sequence in the middle of the bucket
        logits_RV = model.step(rows)
        own = [row for index, row in enumerate(logits_RV) if index != 3][: len(chain)]
        for offset, row_V in enumerate(own):
            assert torch.equal(row_V, expected[position - start + offset]), f"position {position + offset}"
        accepted = max(1, len(chain) - position % 2)
        model.pool.commit(tree, nodes[:accepted])
        position += accepted


def test_kept_descendants_need_no_second_forward(tiny_target: Path) -> None:
    """Children of a node whose KV survived a commit see the same keys as if all had been committed."""
    model = PagedModel.load(str(tiny_target), EngineConfig(num_pages=16))
    tokens = random_tokens(80, 320)
    plain, tree = model.pool.begin(), model.pool.begin()
    for seq in (plain, tree):
        model.prefill(seq, tokens[:60])
    expected = [model.step([Row(plain, token)])[0] for token in tokens[60:64]]
    nodes = model.pool.append(tree, [None, -1, -2]).nodes
    model.step([Row(tree, token, node) for token, node in zip(tokens[60:63], nodes, strict=True)])
    model.pool.commit(tree, nodes[:1], keep=nodes[1:])
    (leaf,) = model.pool.append(tree, [nodes[2]]).nodes
    assert torch.equal(model.step([Row(tree, tokens[63], leaf)])[0], expected[3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_has_the_same_bits_whoever_is_packed_with_it(tiny_target: Path, dtype: str) -> None:
    model = PagedModel.load(str(tiny_target), EngineConfig(num_pages=64, prefill_chunk=128, dtype=dtype))
    prompts = [random_tokens(count, seed=count) for count in (70, 5, 33, 64, 1, 100, 17)]

    def prefilled(chosen: list[int]) -> dict[int, torch.Tensor]:
        runs = [(model.pool.begin(), prompts[index]) for index in chosen]
        found = dict(zip(chosen, model.prefill_packed(runs), strict=True))
        for seq, _ in runs:
            model.pool.free(seq)
        return found

    together = prefilled(list(range(len(prompts))))
    for others in ([3], [4, 1], [6, 0, 5], [2, 5, 1, 0]):
        for index, logits_V in prefilled(others).items():
            assert torch.equal(logits_V, together[index])


def test_forks_share_a_prefix_and_diverge(tiny_target: Path) -> None:
    model = PagedModel.load(str(tiny_target), EngineConfig(num_pages=32))
    prompt = random_tokens(70, 320)
    trunk = model.pool.begin()
    model.prefill(trunk, prompt)
    branches = [model.pool.fork(trunk) for _ in range(3)]
    packed_RV = model.step([Row(seq, 10 + i) for i, seq in enumerate(branches)])
    for i, row_V in enumerate(packed_RV):
        lone = model.pool.begin()
        model.prefill(lone, prompt)
        assert torch.equal(row_V, model.step([Row(lone, 10 + i)])[0])


def test_too_many_rows_are_refused(tiny_target: Path) -> None:
    model = PagedModel.load(str(tiny_target), EngineConfig(num_pages=16, row_bucket=4, lanes=2))
    seq = model.pool.begin()
    model.prefill(seq, [1, 2, 3])
    nodes = model.pool.append(seq, [None] * 5).nodes
    with pytest.raises(ValueError, match=r"1\.\.4 rows, got 5"):
        model.step([Row(seq, 1, node) for node in nodes])
    with pytest.raises(ValueError, match="at most 2 rows of one sequence, got 3"):
        model.step([Row(seq, 1, node) for node in nodes[:3]])


def test_a_family_that_bypasses_the_interface_is_refused_by_name(tmp_path: Path) -> None:
    StableLmForCausalLM(StableLmConfig(**SMALL, intermediate_size=48, num_key_value_heads=4)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match="'stablelm' cannot be decoded"):
        PagedModel.load(str(tmp_path), EngineConfig())


def test_a_missing_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a folder with config\.json"):
        PagedModel.load(str(tmp_path / "nothing"), EngineConfig())


def test_reference_model_is_unchanged_by_our_attention(tiny_target: Path) -> None:
    """Loading for the engine must not leak into models that the user loads as usual."""
    PagedModel.load(str(tiny_target), EngineConfig(num_pages=16))
    reference = AutoModelForCausalLM.from_pretrained(tiny_target)
    assert reference.config._attn_implementation != "foredraft"
