"""Ask one model for many completions, through a running server or an engine in this process."""

import asyncio
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, Protocol, TypeVar

import aiohttp

_Result = TypeVar("_Result")
_CONNECTION_RETRY_SECONDS = (1, 2, 4)


@dataclass(frozen=True)
class Job:
    """One input row. Exactly one of `prompt` (sent as it is) and `messages` (through the chat template) is set."""

    index: int
    id: Any
    prompt: str | None
    messages: list[dict] | None
    sampling_params: dict

    @property
    def input_sha256(self) -> str:
        """Identifies what the model is asked: prompt or messages, and sampling parameters."""
        content = [self.prompt, self.messages, self.sampling_params]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish_reason: str
    verify_steps: int | None
    """Verify passes of a speculative server; None where the server reports none."""

    @classmethod
    def from_response(cls, response: dict) -> "Answer":
        """From the reply of /generate or Engine.async_generate (SGLang 0.5.23)."""
        meta = response["meta_info"]
        reason = meta["finish_reason"] or {}
        if reason.get("type") == "abort":
            raise RequestFailed(reason.get("message") or "aborted by the server")
        return cls(
            text=response["text"],
            tokens=response["output_ids"],
            prompt_tokens=meta["prompt_tokens"],
            finish_reason=reason.get("type", "unknown"),
            verify_steps=meta.get("spec_verify_ct"),
        )

    @property
    def decoded_tokens(self) -> int:
        """Tokens after the first: prefill gives that one, a plain decode step or a verify pass the others."""
        return max(len(self.tokens) - 1, 0)

    @property
    def steps(self) -> int:
        return self.decoded_tokens if self.verify_steps is None else self.verify_steps

    @property
    def accept_length(self) -> float | None:
        """Decoded tokens a verify pass; None for plain decoding. (SGLang's spec_accept_length adds the first token.)"""
        return self.decoded_tokens / self.verify_steps if self.verify_steps else None


class RequestFailed(Exception):
    """The server refused or failed this request; others may succeed."""


class ServerGone(Exception):
    """Nothing answers any more: the run cannot go on."""


class Backend(Protocol):
    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Drive `work`, which may await `answer`, to its end. An interruption raises KeyboardInterrupt."""

    async def answer(self, job: Job) -> Answer: ...


async def answer_all(
    backend: Backend, jobs: Iterable[Job], concurrency: int
) -> AsyncIterator[tuple[Job, Answer | RequestFailed]]:
    """Yield every job with its outcome, in the order in which they finish, `concurrency` of them in flight.

    Raises ServerGone, after the answers that came before it.
    """

    async def outcome(job: Job) -> tuple[Job, Answer | RequestFailed | ServerGone]:
        try:
            return job, await backend.answer(job)
        except (RequestFailed, ServerGone) as failure:
            return job, failure

    remaining = iter(jobs)
    running: set[asyncio.Task] = set()
    try:
        while True:
            while len(running) < concurrency and (job := next(remaining, None)) is not None:
                running.add(asyncio.ensure_future(outcome(job)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            outcomes = [task.result() for task in done]
            for job, result in outcomes:
                if not isinstance(result, ServerGone):
                    yield job, result
            for _, result in outcomes:
                if isinstance(result, ServerGone):
                    raise result
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class ServerBackend:
    """A running SGLang server, through its native /generate."""

    def __init__(self, url: str, request_seconds: float = 3600.0):
        self._url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=request_seconds, sock_connect=30)

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        async def with_session() -> _Result:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=self._timeout, connector=connector) as self._session:
                return await work

        return asyncio.run(with_session())

    async def answer(self, job: Job) -> Answer:
        if job.messages is None:
            question = {"text": job.prompt}
        else:
            question = {"input_ids": _field(await self._post("/tokenize", {"messages": job.messages}), "tokens")}
        reply = await self._post("/generate", {**question, "sampling_params": job.sampling_params})
        _field(reply, "meta_info")
        return Answer.from_response(reply)

    async def _post(self, path: str, body: dict) -> dict:
        for pause in (*_CONNECTION_RETRY_SECONDS, None):
            try:
                async with self._session.post(self._url + path, json=body) as response:
                    if response.status != 200:
                        raise RequestFailed(f"{path} answered {response.status}: {(await response.text())[:500]}")
                    return await response.json()
            except aiohttp.ClientConnectionError as error:
                if pause is None:
                    raise ServerGone(f"{self._url} does not answer: {error}") from error
                await asyncio.sleep(pause)
            except (aiohttp.ContentTypeError, aiohttp.ClientPayloadError, ValueError) as error:
                raise RequestFailed(f"{path}: the answer is not whole JSON ({error})") from error
            except TimeoutError as error:
                raise RequestFailed(f"{path}: no answer within {self._timeout.total:.0f} s") from error
        raise AssertionError("unreachable")


def _field(reply: Any, name: str) -> Any:
    """reply[name]; RequestFailed where something else than SGLang answered."""
    if not isinstance(reply, dict) or name not in reply:
        raise RequestFailed(f"the server's answer has no {name!r}: is this SGLang's address?")
    return reply[name]


class EngineBackend:
    """An `sglang.Engine` in this process. Make one at most, from the main thread and before anything imports torch."""

    def __init__(self, arguments: Sequence[str]):
        """`arguments`: SGLang server flags, `--model-path` among them."""
        self._task: asyncio.Task | None = None
        # The terminal sends Ctrl-C to SGLang's processes too. They inherit the blocked signal, so they live on until
        # this process has let the answers in flight go and ends them. (Starting the resource tracker unblocks the signal
        # again, so it starts first.)
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        threading.Thread(target=self._await_interruptions, daemon=True).start()

        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        load_plugins()  # Before the flags are read: `--speculative-algorithm jetflow` comes from a plugin.
        if not any(argument.split("=")[0] == "--log-level" for argument in arguments):
            arguments = [*arguments, "--log-level", "error"]
        self._engine = Engine(server_args=prepare_server_args(list(arguments)))

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        self._task = self._engine.loop.create_task(work)
        try:
            return self._engine.loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            self._engine.shutdown()

    async def answer(self, job: Job) -> Answer:
        try:
            question = (
                {"prompt": job.prompt} if job.messages is None else {"input_ids": self._chat_tokens(job.messages)}
            )
            response = await self._engine.async_generate(**question, sampling_params=job.sampling_params)
        except ValueError as error:
            raise RequestFailed(str(error)) from error
        return Answer.from_response(response)

    def _chat_tokens(self, messages: list[dict]) -> list[int]:
        tokenizer = self._engine.tokenizer_manager.tokenizer
        try:
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is code: jinja's errors, or none at all
            raise RequestFailed(f"the model's chat template refuses these messages ({error})") from error

    def _await_interruptions(self) -> None:
        signal.sigwait({signal.SIGINT})
        if self._task is not None:
            self._engine.loop.call_soon_threadsafe(self._task.cancel)
            signal.sigwait({signal.SIGINT})  # A second Ctrl-C does not wait.
        from sglang.srt.utils import kill_process_tree

        print("interrupted", file=sys.stderr)
        kill_process_tree(os.getpid(), include_parent=False)
        os._exit(130)
