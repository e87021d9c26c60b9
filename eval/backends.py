"""What an evaluation asks of a running server beyond an answer's text and tokens."""

import json
import time
import urllib.request
from dataclasses import dataclass

from sgl_specflow.launch.generation import Job, RequestFailed, ServerBackend

TOP_TOKENS = 5


def empty_prefix_cache(url: str) -> None:
    """Returns when the server at `url` is idle and holds no prefix any more."""
    with urllib.request.urlopen(url + "/flush_cache?timeout=30", timeout=60):
        pass


@dataclass(frozen=True)
class Decoded:
    """One answer with what the server thought at each of its positions."""

    prompt: list[int]
    tokens: list[int]
    top: list[dict[int, float]]
    """For each position, the log-probabilities (natural) of its TOP_TOKENS likeliest tokens."""
    verify_steps: int | None
    """Verify passes of a speculative server; None where the server reports none."""

    @classmethod
    def from_response(cls, prompt: list[int], response: dict) -> "Decoded":
        """From the reply of /generate (SGLang 0.5.23), whose entries are (log-probability, token, text)."""
        top = [{token: value for value, token, _ in entry} for entry in response["meta_info"]["output_top_logprobs"]]
        if len(top) != len(response["output_ids"]):
            raise RequestFailed(f"{len(response['output_ids'])} tokens came with log-probabilities of {len(top)}")
        return cls(prompt, response["output_ids"], top, response["meta_info"].get("spec_verify_ct"))


class TopTokenBackend(ServerBackend):
    """A running server whose answers carry log-probabilities. Jobs must hold messages."""

    async def answer(self, job: Job) -> Decoded:
        prompt = (await self._post("/tokenize", {"messages": job.messages}))["tokens"]
        return await self.continuation(prompt, job.sampling_params)

    async def continuation(self, prompt: list[int], sampling_params: dict) -> Decoded:
        """The answer to a prompt given as tokens. Raises RequestFailed."""
        body = {"input_ids": prompt, "return_logprob": True, "top_logprobs_num": TOP_TOKENS}
        return Decoded.from_response(
            prompt, await self._post("/generate", {**body, "sampling_params": sampling_params})
        )


@dataclass(frozen=True)
class Streamed:
    """When the parts of one answer arrived. Times are seconds of time.perf_counter."""

    sent: float
    arrivals: list[float]
    """One a chunk. SGLang sends a chunk a step, and joins those that the client has not taken yet."""
    counts: list[int]
    """Tokens that had come with each chunk, all before it included."""
    verify_steps: int | None
    """Verify passes of a speculative server; None where the server reports none."""

    @property
    def decoded_tokens(self) -> int:
        """Tokens after the first, which is prefill's."""
        return self.counts[-1] - 1

    @property
    def steps(self) -> int:
        return self.decoded_tokens if self.verify_steps is None else self.verify_steps

    def tokens_after(self, moment: float) -> int:
        """Tokens of the chunks that arrived after `moment`."""
        return self.counts[-1] - max((n for at, n in zip(self.arrivals, self.counts) if at <= moment), default=0)


class StreamingBackend(ServerBackend):
    """A running server whose answers are taken chunk by chunk. Jobs must hold messages."""

    async def answer(self, job: Job) -> Streamed:
        prompt = (await self._post("/tokenize", {"messages": job.messages}))["tokens"]
        body = {"input_ids": prompt, "stream": True, "sampling_params": job.sampling_params}
        arrivals, lines = [], []
        sent = time.perf_counter()
        async with self._session.post(self._url + "/generate", json=body) as response:
            if response.status != 200:
                raise RequestFailed(f"/generate answered {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    arrivals.append(time.perf_counter())
                    lines.append(line)  # read later: this loop must keep up with the server
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        if not chunks or "meta_info" not in chunks[-1]:
            raise RequestFailed(f"the stream broke off: {chunks[-1:]}")
        metas = [chunk["meta_info"] for chunk in chunks]
        return Streamed(sent, arrivals, [meta["completion_tokens"] for meta in metas], metas[-1].get("spec_verify_ct"))
