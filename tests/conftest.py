"""Shared fixtures: tiny random models made on the spot, and the unpacked SmolLM2 for slow tests.

Nothing here touches the network. Threads are limited to one before torch is imported, because tiny models
lose more to thread hand-offs than they gain.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# before anything imports triton, which decides once; where there is a GPU the kernels are compiled
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft.infer.cli import main
from foredraft.infer.drafter_card import DrafterCard, write_drafter_card
from foredraft.infer.identity import identify_target, tokenizer_sha256
from foredraft.infer.outcome_records import OutcomeRecords
from foredraft.infer.params import EngineConfig
from foredraft.infer.target import load_tokenizer

if TYPE_CHECKING:
    from foredraft.train.outcome_log import OutcomeLog
    from foredraft.train.target_log import TargetLog

REPOSITORY = Path(__file__).resolve().parent.parent
SMOLLM2 = REPOSITORY / "models" / "SmolLM2-135M-Instruct"

# a shell that starts the tests in the background has it ignored, and all their processes would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER_CORPUS = [
    "The quick brown fox jumps over the lazy dog while the sun goes down.",
    "Write a short story about a garden, then explain what the story is about.",
    "def add(a, b):\n    return a + b\n",
    "user assistant system: numbers 0 1 2 3 4 5 6 7 8 9, and so on.",
]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 320 tokens with a ChatML template; every text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def build_llama(seed: int = 0, **overrides: object) -> LlamaForCausalLM:
    """A random Llama whose wide initialisation makes its distributions peaked enough to be worth guessing."""
    settings: dict[str, object] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**(settings | overrides))).eval()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer that every tiny model folder holds."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def make_tiny_model(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Callable[..., Path]:
    """`make_tiny_model(name, seed=0, **LlamaConfig fields)` writes a float32 model and its tokenizer."""

    def make(name: str, seed: int = 0, **overrides: object) -> Path:
        folder = tmp_path_factory.mktemp("models") / name
        build_llama(seed, **overrides).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_target(make_tiny_model: Callable[..., Path]) -> Path:
    """Folder of a random three-layer Llama, 320 tokens, context 1024, float32."""
    return make_tiny_model("tiny-target")


@pytest.fixture(scope="session")
def tiny_drafter(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """Folder of the tiny target with disturbed weights: its best guess is right about every other time."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(0.04 * weight.std() * noise)
    folder = tmp_path_factory.mktemp("models") / "tiny-drafter"
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_artifact(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, tiny_drafter: Path
) -> Callable[..., Path]:
    """`make_artifact(**DrafterCard fields)` -> the tiny drafter with draft vocabulary and foredraft.json."""

    def make(**fields: Any) -> Path:
        folder = shutil.copytree(tiny_drafter, tmp_path_factory.mktemp("artifact") / "drafter")
        save_file({"d2t": torch.arange(0, 300)}, folder / "draft_vocab.safetensors")
        card = DrafterCard(
            family="lm",
            target=identify_target(str(tiny_target)),
            tokenizer_sha256=tokenizer_sha256(load_tokenizer(str(tiny_target), EngineConfig())),
            draft_vocab="draft_vocab.safetensors",
            max_depth=9,
            **fields,
        )
        write_drafter_card(folder, card)
        return folder

    return make


@pytest.fixture(scope="session")
def make_log(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Callable[..., TargetLog]:
    """`make_log(prompts, heldout, **LogRecipe fields)` -> log of the tiny target; `heldout(n)` splits."""
    # not above: a machine that only serves has no pyarrow
    from foredraft.train.collect import collect
    from foredraft.train.log_recipe import LogRecipe, ResponseGroup

    def make(prompts: list[str], heldout: Callable[[int], bool], **changes: Any) -> TargetLog:
        folder = tmp_path_factory.mktemp("logged")
        splits = ["heldout" if heldout(n) else "train" for n in range(len(prompts))]
        lines = [json.dumps({"prompt": p, "split": s}) for p, s in zip(prompts, splits, strict=True)]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        settings: dict[str, Any] = {
            "target": str(tiny_target),
            "prompts": str(folder / "prompts.jsonl"),
            "out": str(folder / "log"),
            "groups": (
                ResponseGroup(responses=1, temperature=0.0),
                ResponseGroup(responses=2, temperature=1.0, top_p=0.95),
            ),
            "max_new_tokens": 24,
            "top_k_logprobs": 16,
            "heldout_fraction": 0.1,
            "seed": 0,
            "prompts_per_shard": 20,
            "dtype": "float32",
            "rows": 32,
        }
        return collect(LogRecipe(**(settings | changes)), "recipe")

    return make


@pytest.fixture(scope="session")
def assert_same_records() -> Callable[[OutcomeLog, OutcomeLog], None]:
    """Compare two folders of outcome records of all parts, element for element."""
    from foredraft.train.outcome_log import OutcomeLog
    from foredraft.train.splits import Part

    def check(first: OutcomeLog, second: OutcomeLog) -> None:
        for read in (*(partial(OutcomeLog.records, part=part) for part in get_args(Part)), OutcomeLog.rounds):
            one, other = read(first), read(second)
            for item in fields(OutcomeRecords):
                assert np.array_equal(getattr(one, item.name), getattr(other, item.name)), item.name

    return check


@pytest.fixture(scope="session")
def assert_same_weights() -> Callable[[Path, Path], None]:
    """Compare the float32 weights of two folders bit for bit."""

    def check(first: Path, second: Path) -> None:
        one, other = (load_file(folder / "model.safetensors") for folder in (first, second))
        assert one.keys() == other.keys()
        assert all(value.dtype == torch.float32 for value in one.values())
        assert [name for name in one if not torch.equal(one[name], other[name])] == []

    return check


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of prompts.jsonl; `argv_of` adds log, drafter, outcomes and predictor."""
    folder = tmp_path_factory.mktemp("undisturbed")
    lines = [{"prompt": f"word {n * n}", "split": "train" if n % 4 else "heldout"} for n in range(48)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="session")
def argv_of(undisturbed: Path, tiny_target: Path) -> Callable[..., list[str]]:
    """`argv_of(stage, out, **changes)`: arguments of `foredraft` for a stage of the smoke recipes' chain.

    The input of each stage is the result of the one before in the folder `undisturbed`, where all four were
    made: log (12 shards), drafter, outcomes and predictor.
    """
    settings: dict[str, dict[str, object]] = {
        "log": {
            "target": tiny_target,
            "prompts": undisturbed / "prompts.jsonl",
            "prompts_per_shard": 4,
            "max_new_tokens": 24,
            "rows": 8,
        },
        "drafter": {
            "target": tiny_target,
            "log": undisturbed / "log",
            "epochs": 8,
            "batch_tokens": 512,
            "save_every": 4,
            "eval_every": 10,
            "reserved_fraction": 0.4,
        },
        "outcomes": {"log": undisturbed / "log", "drafter": undisturbed / "drafter"},
        "predictor": {"outcomes": undisturbed / "outcomes"},
    }

    def argv(stage: str, out: Path, **changes: object) -> list[str]:
        command = f"train-{stage}" if stage in ("drafter", "predictor") else stage
        recipe = REPOSITORY / "recipes" / f"smoke_{stage}.yaml"
        flags = [
            part for key, value in (settings[stage] | changes).items() for part in (f"--{key}", str(value))
        ]
        return [command, "--config", str(recipe), "--out", str(out), *flags]

    for stage in settings:
        assert main(argv(stage, undisturbed / stage)) == 0
    return argv


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[[Any], Path]:
    """`write_recipe(recipe)`: its YAML file, beside the recipe's `out`."""

    def without_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_nulls(member) for key, member in value.items() if member is not None}
        return list(value) if isinstance(value, tuple) else value

    def write(recipe: Any) -> Path:
        path = tmp_path / f"{Path(recipe.out).name}.yaml"
        path.write_text(yaml.safe_dump(without_nulls(asdict(recipe))))
        return path

    return write


@pytest.fixture(scope="session")
def launch_on_cpus() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`accelerate launch` of so many processes of a command line, at a free port; it has to succeed."""

    def launch(num_processes: int, *command: str) -> subprocess.CompletedProcess[str]:
        flags = ["--multi_gpu"] if num_processes > 1 else []
        accelerate = [sys.executable, "-m", "accelerate.commands.launch", *flags, "--main_process_port", "0"]
        result = subprocess.run(
            [*accelerate, "--num_processes", str(num_processes), *command],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result

    return launch


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist without network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in bfloat16, for tests marked slow."""
    if not (SMOLLM2 / "model.safetensors").exists():
        pytest.skip(f"{SMOLLM2} is missing: run `make model`")
    return SMOLLM2


@pytest.fixture(scope="session")
def kernel_device() -> str:
    """Where tests of kernels put their tensors: a GPU, or the CPU under Triton's interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` and its like return with NaN or the lowest integer: all must be written."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.dtype == torch.bool:
                return tensor.fill_(True)
            value = torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
            return tensor.fill_(value)

        return made

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
