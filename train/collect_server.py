"""Responses from an OpenAI-compatible server (vLLM, SGLang) that runs the target.

The completions endpoint takes prompts as token ids and, asked to, gives token ids back (vLLM's
`return_tokens_as_token_ids` writes a token as `token_id:123`). The server draws noise of its own: at
temperature 0 its tokens stand for the target's, at others they are samples that nothing can replay.

Shape letters: T response tokens, K kept log-probabilities.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import httpx
import numpy as np

from foredraft.train.continuous import Job
from foredraft.train.log_recipe import ServerRecipe

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
LOWEST = (
    -60.0
)  # log-probability of a place that the server left empty: float16 keeps it, and it weighs nothing


class ServerDecoder:
    """Sends jobs to a server, several at once.

    Args:
        recipe: of the server.
        num_kept: K; 0: tokens only.
    """

    def __init__(self, recipe: ServerRecipe, num_kept: int) -> None:
        self.recipe, self.num_kept = recipe, num_kept
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=recipe.url.rstrip("/"), timeout=recipe.timeout_s, headers=headers)

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
        """Every job with its fields of a log row, as they come.

        Raises:
            ValueError: the server cannot be reached, refuses, or gives no token ids.
        """
        with ThreadPoolExecutor(self.recipe.concurrency) as pool:
            futures = {pool.submit(self.complete, job): job for job in jobs}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:
                for future in futures:
                    future.cancel()

    def complete(self, job: Job) -> dict[str, Any]:
        """One response."""
        params = job.params
        request = {
            "model": self.recipe.model,
            "prompt": list(job.prompt_ids),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": (params.seed or 0) % 2**31,
            "logprobs": max(1, self.num_kept),
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
        }
        # fields that other servers than vLLM refuse are sent where they say something
        extras = {"top_k": params.top_k, "min_p": params.min_p}
        request |= {name: value for name, value in extras.items() if value}
        if params.repetition_penalty != 1.0:
            request["repetition_penalty"] = params.repetition_penalty
        choice = self._post(request)["choices"][0]
        return self._parse(choice)

    def _post(self, request: dict[str, Any]) -> dict[str, Any]:
        for attempt in range(self.recipe.retries + 1):
            is_last = attempt == self.recipe.retries
            try:
                answer = self.client.post("/completions", json=request)
            except httpx.TransportError as error:
                if is_last:
                    raise ValueError(f"server {self.recipe.url} cannot be reached: {error}") from None
            else:
                if answer.status_code == 200:
                    return answer.json()
                if is_last or answer.status_code not in RETRIED:
                    raise ValueError(
                        f"server {self.recipe.url} answers {answer.status_code}: {answer.text[:300]}"
                    )
            time.sleep(min(30.0, 0.5 * 2.0**attempt))
        raise AssertionError("the last attempt returns or raises")

    def _parse(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Token ids, kept distributions and how it ended."""
        logprobs = choice.get("logprobs") or {}
        ids = [_token_id(token) for token in logprobs.get("tokens") or ()]
        if not ids or None in ids:
            raise ValueError(
                f"server {self.recipe.url} gives no token ids (expected logprobs.tokens like `token_id:123`, "
                f"found {str(logprobs.get('tokens'))[:80]}); use a version of vLLM that knows "
                "return_tokens_as_token_ids, or let foredraft decode"
            )
        length, width = len(ids), self.num_kept
        ids_TK = np.zeros((length, width), np.int32)
        logprobs_TK = np.full((length, width), LOWEST, np.float16)
        for place, top in enumerate(logprobs.get("top_logprobs") or [{}] * length):
            named = [(_token_id(name), value) for name, value in (top or {}).items()]
            known = [(token, value) for token, value in named if token is not None]
            pairs = sorted(known, key=lambda pair: -pair[1])
            used = {token for token, _ in pairs[:width]}
            unused = (token for token in range(width + len(used)) if token not in used)
            filled = [*pairs[:width], *((token, LOWEST) for token in unused)][:width]
            ids_TK[place] = [token for token, _ in filled]
            logprobs_TK[place] = [max(LOWEST, value) for _, value in filled]
        mass_T = np.exp(logprobs_TK.astype(np.float32)).sum(1)
        return {
            "response_ids": np.array(ids, np.int32),
            "topk_ids": ids_TK,
            "topk_logprobs": logprobs_TK,
            "tail_mass": np.clip(1.0 - mass_T, 0.0, 1.0).astype(np.float32),
            "finish_reason": "stop" if choice.get("finish_reason") == "stop" else "length",
        }


def _token_id(name: Any) -> int | None:
    """The id in `token_id:123`, or None."""
    head, _, number = str(name).partition("token_id:")
    return int(number) if not head and number.isdigit() else None
