"""What training and log collection cost against plain transformers, as ratios of things run interleaved.

    python scripts/bench_train.py --recipe recipes/smollm2-135m/drafter.yaml
    python scripts/bench_train.py --dry-run

Training: one update of the `lm` recipe (`Trainer.train_step`) against the loop that one would write: the same
network, batch and optimizer, logits over the whole vocabulary at every position, KL against the teacher's
logits of a forward in the loop. Peak memory: of each in a process of its own, above what it had loaded.
Collection: `ContinuousDecoder` against `model.generate` with the same number of rows; a greedy and a sampled
response to every prompt, prompts and responses of mixed lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from foredraft.infer.config import read_config
from foredraft.infer.machine import processor_name
from foredraft.infer.paged_model import PagedModel
from foredraft.infer.params import SamplingParams
from foredraft.train.batches import Batch, collate
from foredraft.train.continuous import ContinuousDecoder, Job, continuous_config
from foredraft.train.drafter import start_accelerator
from foredraft.train.drafter_init import build_network, load_model
from foredraft.train.drafter_recipe import DrafterRecipe
from foredraft.train.log_rows import LogRow
from foredraft.train.trainer import Trainer, TrainingData, build_optimizer

NUM_KEPT = 32
PARTS = ("foredraft", "plain")
TEMPERATURES = (0.0, 1.0)  # a response of each for every prompt, as in the log recipes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; prints a table and, with --out, writes JSON."""
    arguments = _parser().parse_args(argv)
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.dry_run:
            arguments.target = str(tiny_model(Path(folder)))
            arguments.rows, arguments.length, arguments.new_tokens = 4, 32, 8
        if arguments.memory_of:
            print(json.dumps(peak_memory(arguments, Path(folder))))
            return 0
        found: dict[str, Any] = {"machine": machine(arguments.threads)}
        found["training"] = bench_training(arguments, Path(folder))
        found["collection"] = bench_collection(arguments)
    print_table(found)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--recipe", default="recipes/demo_drafter.yaml", help="of an `lm` drafter")
    parser.add_argument("--length", type=int, default=256, help="tokens of a training sequence")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repetitions")
    parser.add_argument("--rows", type=int, default=32, help="responses decoded at once")
    parser.add_argument("--new-tokens", type=int, default=128, help="longest response of the collection")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", help="JSON file for the figures")
    parser.add_argument("--dry-run", action="store_true", help="a tiny random model, in seconds")
    parser.add_argument("--memory-of", choices=PARTS, help=argparse.SUPPRESS)
    return parser


def tiny_model(folder: Path) -> Path:
    """A random Llama of 512 tokens."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=4, **sizes)).save_pretrained(
        folder / "tiny"
    )
    return folder / "tiny"


def random_rows(vocab_size: int, length: int, count: int) -> list[LogRow]:
    """Log rows of random tokens: half prompt, half response, with a teacher of NUM_KEPT tokens."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(count):
        half = length // 2
        ids_TK = np.stack([generator.choice(vocab_size, NUM_KEPT, replace=False) for _ in range(half)])
        logits_TK = np.sort(generator.normal(size=(half, NUM_KEPT)) * 2, axis=1)[:, ::-1]
        logprobs_TK = logits_TK - np.log(np.exp(logits_TK).sum(1, keepdims=True)) - 0.05
        rows.append(
            LogRow(
                request_id=f"{number:032x}",
                prompt_ids=generator.integers(vocab_size, size=half).astype(np.int32),
                response_ids=ids_TK[:, 0].astype(np.int32),
                first_position=half,
                seed=number,
                choice=0,
                temperature=0.0,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                repetition_penalty=1.0,
                topk_ids=ids_TK.astype(np.int32),
                topk_logprobs=logprobs_TK.astype(np.float16),
                tail_mass=np.full(half, 0.05, np.float32),
                finish_reason="length",
                split="train",
            )
        )
    return rows


class TrainingCase:
    """One update of the recipe's trainer, and of the plain loop, on the same rows."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        recipe, _ = read_config(DrafterRecipe, ["--config", arguments.recipe], "bench")
        length = arguments.length
        per_batch = max(1, recipe.batch_tokens // length) if not arguments.dry_run else 2
        self.recipe = replace(
            recipe,
            target=arguments.target,
            out=str(folder / "drafter"),
            max_length=length,
            batch_tokens=per_batch * length,
            precision=arguments.dtype,
            draft_vocab_size=min(recipe.draft_vocab_size, 256)
            if arguments.dry_run
            else recipe.draft_vocab_size,
            accumulation=1,
            epochs=1000.0,
            threads=arguments.threads,
        )
        self.teacher = load_model(arguments.target, None, self.recipe)
        vocab_size = self.teacher.config.vocab_size
        self.rows = random_rows(vocab_size, length, per_batch)
        self.num_trained = sum(len(row.response_ids) for row in self.rows)
        self.step = 0

    def foredraft(self) -> Callable[[], None]:
        """An update of the trainer; the log has paid for the teacher."""
        recipe = self.recipe
        size = self.teacher.config.vocab_size
        d2t_D = torch.arange(size)[: recipe.draft_vocab_size] if recipe.draft_vocab_size else None
        network = build_network(recipe, d2t_D)
        accelerator = start_accelerator(recipe)
        data = TrainingData(self.rows, [])
        work = Path(recipe.out + ".training")
        work.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(recipe, network, data, work, "bench", accelerator)

        def update() -> None:
            trainer.train_step(self.step)
            self.step += 1

        return update

    def plain(self) -> Callable[[], None]:
        """The loop that one would write."""

        def teach(batch: Batch) -> torch.Tensor:
            with torch.no_grad(), self._autocast():
                return self.teacher(input_ids=batch.ids_BT, use_cache=False).logits

        return self._plain_loop(lambda batch: partial(teach, batch))

    def without_teacher(self) -> Callable[[], None]:
        """The plain loop with its teacher's logits at hand, as if they cost nothing."""

        def teach_once(batch: Batch) -> Callable[[], torch.Tensor]:
            with torch.no_grad():
                teacher_BTV = self.teacher(input_ids=batch.ids_BT, use_cache=False).logits
            return lambda: teacher_BTV

        return self._plain_loop(teach_once)

    def _plain_loop(self, make_teacher: Callable[[Batch], Callable[[], torch.Tensor]]) -> Callable[[], None]:
        recipe = self.recipe
        network = build_network(recipe, None)
        optimizer = build_optimizer(network, recipe)
        student, batch = network.model.train(), collate([[row] for row in self.rows], recipe.max_length)
        teacher = make_teacher(batch)

        def update() -> None:
            teacher_BTV = teacher()
            with self._autocast():
                student_BTV = student(input_ids=batch.ids_BT, use_cache=False).logits
            loss = dense_kl(student_BTV, teacher_BTV, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), recipe.clip_norm)
            optimizer.step()

        return update

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.precision == "bfloat16")


def dense_kl(student_BTV: torch.Tensor, teacher_BTV: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Forward KL over the whole vocabulary, mean over response tokens."""
    student_BTV, teacher_BTV = student_BTV.float().log_softmax(-1), teacher_BTV.float().log_softmax(-1)
    kl_BT = (teacher_BTV.exp() * (teacher_BTV - student_BTV)).sum(-1)
    return (kl_BT.flatten()[batch.positions_N] * batch.weights_N).sum() / batch.weights_N.sum()


def bench_training(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of an update and peak memory of both, and their ratios."""
    case = TrainingCase(arguments, folder)
    updates = {
        "foredraft": case.foredraft(),
        "plain": case.plain(),
        "without_teacher": case.without_teacher(),
    }
    seconds = interleaved(updates, arguments.repeats)
    memory = {part: measured_apart(part, arguments) for part in PARTS}
    return {
        "tokens_per_update": case.num_trained,
        "vocab_size": case.teacher.config.vocab_size,
        "seconds": seconds,
        "tokens_per_second": {name: case.num_trained / value for name, value in seconds.items()},
        "speed_ratio": seconds["plain"] / seconds["foredraft"],
        "speed_ratio_without_teacher": seconds["without_teacher"] / seconds["foredraft"],
        "peak_bytes": memory,
        "memory_ratio": memory["foredraft"] / max(1, memory["plain"]),
    }


def measured_apart(part: str, arguments: argparse.Namespace) -> int:
    """Peak memory of some updates in a process of its own, above what was there before the first."""
    command = [sys.executable, __file__, "--memory-of", part]
    for name in ("target", "recipe", "length", "threads", "dtype"):
        command += [f"--{name}", str(getattr(arguments, name))]
    command += ["--dry-run"] * arguments.dry_run
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(result.stdout.splitlines()[-1]))


def peak_memory(arguments: argparse.Namespace, folder: Path) -> int:
    """Bytes that updates of one part need at most beyond the models, optimizer included."""
    case = TrainingCase(arguments, folder)
    update = getattr(case, arguments.memory_of)()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    for _ in range(3):
        update()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def bench_collection(arguments: argparse.Namespace) -> dict[str, Any]:
    """Response tokens a second of our decoder and of `generate`, on prompts of mixed lengths."""
    rows, longest = arguments.rows, arguments.new_tokens
    generator = np.random.default_rng(1)
    prompts = [generator.integers(10, 500, size=generator.integers(8, 128)).tolist() for _ in range(4 * rows)]
    # responses end where they like; here at lengths drawn beforehand, the same for both
    lengths_PJ = generator.integers(longest // 8, longest + 1, size=(len(prompts), len(TEMPERATURES)))
    config = continuous_config(map(len, prompts), len(TEMPERATURES), longest, rows, dtype=arguments.dtype)
    model = PagedModel.load(arguments.target, config)
    dtype = getattr(torch, arguments.dtype)
    reference = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype).eval()

    def ours(num_prompts: int) -> None:
        jobs = [
            Job(
                key=(index, choice),
                prompt_ids=tuple(prompt),
                params=SamplingParams(
                    max_new_tokens=int(lengths_PJ[index, choice]),
                    temperature=temperature,
                    top_p=0.95,
                    seed=index,
                ),
            )
            for index, prompt in enumerate(prompts[:num_prompts])
            for choice, temperature in enumerate(TEMPERATURES)
        ]
        for _ in ContinuousDecoder(model, frozenset(), NUM_KEPT).run(jobs):
            pass

    def theirs(num_prompts: int) -> None:
        for choice, temperature in enumerate(TEMPERATURES):
            for start in range(0, num_prompts, rows):
                batch = prompts[start : min(start + rows, num_prompts)]
                width = max(map(len, batch))
                ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
                mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
                # a batch goes on until its last sequence ends
                most = int(lengths_PJ[start : start + rows, choice].max())
                sampling = {"temperature": temperature, "top_p": 0.95, "top_k": 0} if temperature else {}
                reference.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=temperature > 0,
                    max_new_tokens=most,
                    eos_token_id=None,
                    pad_token_id=0,
                    **sampling,
                )

    decoders = {"foredraft": ours, "generate": theirs}
    seconds = interleaved(
        {name: partial(run, len(prompts)) for name, run in decoders.items()},
        max(1, arguments.repeats // 2),
        warm_up={name: partial(run, 2) for name, run in decoders.items()},
    )
    num_tokens = int(lengths_PJ.sum())
    return {
        "responses": lengths_PJ.size,
        "rows": rows,
        "tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": {name: num_tokens / value for name, value in seconds.items()},
        "speed_ratio": seconds["generate"] / seconds["foredraft"],
    }


def interleaved(
    runs: dict[str, Callable[[], None]], repeats: int, warm_up: dict[str, Callable[[], None]] | None = None
) -> dict[str, float]:
    """Median seconds of each run, in turns; before them the warm-ups, by default the runs themselves."""
    for run in (warm_up or runs).values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine(threads: int) -> dict[str, Any]:
    """Where it ran."""
    return {
        "processor": processor_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def print_table(found: dict[str, Any]) -> None:
    """The figures as Markdown."""
    training, collection = found["training"], found["collection"]
    print("| | foredraft | plain transformers | ratio |\n|---|---|---|---|")
    rates, memory = training["tokens_per_second"], training["peak_bytes"]
    print(
        f"| training, response tokens/s | {rates['foredraft']:.0f} | {rates['plain']:.0f} | "
        f"{training['speed_ratio']:.2f} |"
    )
    print(
        f"| the same, teacher's logits free | {rates['foredraft']:.0f} | {rates['without_teacher']:.0f} | "
        f"{training['speed_ratio_without_teacher']:.2f} |"
    )
    print(
        f"| training, peak MiB above the models | {memory['foredraft'] / 2**20:.0f} | "
        f"{memory['plain'] / 2**20:.0f} | {training['memory_ratio']:.2f} |"
    )
    rates = collection["tokens_per_second"]
    print(
        f"| collection, tokens/s | {rates['foredraft']:.0f} | {rates['generate']:.0f} | "
        f"{collection['speed_ratio']:.2f} |"
    )
    print(f"\n{', '.join(f'{name} {value}' for name, value in found['machine'].items())}")


if __name__ == "__main__":
    sys.exit(main())
