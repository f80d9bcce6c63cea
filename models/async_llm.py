"""`AsyncLLM`: many clients of one engine, each an async iterator.

    client (event loop)                              engine's thread
    generate() ── add ────────────────> commands ──> engine.add_request
       │                                             engine.step, step, step ...
       │ <── mailbox: the newest output <─────────── what changed
    break, cancel ── abort ───────────> commands ──> engine.abort

The engine belongs to one thread. A client's mailbox holds the newest output alone, and that is made only when the client has
taken the one before: a slow reader gets fewer, longer outputs, costs nothing, and holds up nobody.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..runtime.params import SamplingParams
from ..scheduler import RequestOutput
from .llm import LLM, Adapter, EngineStats, Messages, Prompt

if TYPE_CHECKING:
    from ..scheduler.engine import Request

# A step that fails is run again, without the request whose text could not be made, if it was that. If the next one fails as
# well, it is the model, and everybody is told.
_MOST_FAILURES = 2


class AsyncLLM:
    """Takes the arguments of `LLM`. Methods may be called from any event loop, until `aclose`.

    Usable as an async context manager, which closes it.
    """

    def __init__(self, model: Any, **arguments: Any) -> None:
        """model   as `LLM` takes it, or an `LLM`, which then belongs to this object's thread alone"""
        if arguments and isinstance(model, LLM):
            raise ValueError(f"model: expected a name with {', '.join(arguments)}, got an LLM")
        self.llm = model if isinstance(model, LLM) else LLM(model, **arguments)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._mailboxes: dict[Request, _Mailbox] = {}  # the thread's
        self._is_closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="octavo-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: Adapter = None,
        delta: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt, text or token ids; yields its output so far whenever it has grown, the last time finished.

        delta   each output has only what is new: text and token_ids of every completion (and logprobs, if asked for) go on
                from those of the output before

        The request is aborted when the iteration is left before its end, or the task is cancelled. Raises ValueError for an
        impossible request, before anything runs, RuntimeError after `aclose`, and what the model raised if it fails.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params: expected SamplingParams, got {params!r}")
        if isinstance(prompt, Integral):
            raise ValueError(f"prompt: expected text or a list of token ids, got {prompt!r}")
        mailbox = _Mailbox(asyncio.get_running_loop())
        adding = self._call(lambda: self._add(prompt, params, lora_request, mailbox))
        seen: RequestOutput | None = None
        try:
            await asyncio.wrap_future(adding)
            while seen is None or not seen.finished:
                output = await mailbox.take()
                if delta and params.is_ranked and not output.finished:
                    continue  # completions that compete for their places have no news, only a result
                yield _news(output, seen) if delta else output
                seen = output
        finally:
            if seen is None or not seen.finished:
                self._tell(lambda: self._abandon(mailbox))

    def chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """`generate` for a conversation, through the model's chat template."""
        prompt = self.llm.tokenizer.encode_chat(messages)
        return self.generate(prompt, sampling_params, **options)

    async def stats(self) -> EngineStats:
        return await asyncio.wrap_future(self._call(self.llm.stats))

    async def aclose(self) -> None:
        """End the engine's thread. What is unfinished is aborted; its iterators get their last output, with reason "abort"."""
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def close(self) -> None:
        """`aclose`, waiting."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._commands.put(None)
        self._thread.join()
        self.llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- to the engine's thread

    def _tell(self, command: Callable[[], None]) -> None:
        with self._closing:
            if not self._is_closed:
                self._commands.put(command)

    def _call(self, command: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(command())
                except BaseException as failure:
                    future.set_exception(failure)

        with self._closing:
            if self._is_closed:
                raise RuntimeError("AsyncLLM: it is closed")
            self._commands.put(run)
        return future

    # -- in the engine's thread

    def _serve(self) -> None:
        """Whatever is raised, this goes on: clients wait for it."""
        engine, failures, is_open = self.llm.engine, 0, True
        while is_open or engine.has_unfinished():
            try:
                if is_open and not self._obey(wait=not engine.has_unfinished()):
                    is_open = False
                    for request in self._mailboxes:
                        engine.abort(request.group.request_id)
                if engine.has_unfinished():
                    self._deliver(engine.step())
                failures = 0
            except BaseException as failure:
                failures += 1
                if failures >= _MOST_FAILURES:
                    self._fail(failure)
                    if not is_open:
                        return
                    failures = 0

    def _obey(self, wait: bool) -> bool:
        """Run the commands there are; waits for one if there is nothing else to do. False when there will be no more."""
        try:
            command = self._commands.get(block=wait)
            while command is not None:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        lora_request: Adapter,
        mailbox: _Mailbox,
    ) -> None:
        [request] = self.llm.add_requests([prompt], params, lora_request)
        mailbox.request = request
        self._mailboxes[request] = mailbox

    def _abandon(self, mailbox: _Mailbox) -> None:
        request = mailbox.request
        if request is not None and self._mailboxes.pop(request, None) and not request.finished:
            self.llm.engine.abort(request.group.request_id)

    def _deliver(self, changed: list[Request]) -> None:
        for request in changed:
            mailbox = self._mailboxes.get(request)
            if mailbox is None:
                continue
            try:
                mailbox.offer(request)
            except Exception as failure:  # its output cannot be made: nobody else's business
                mailbox.fail(failure)
                self._abandon(mailbox)
                continue
            if mailbox.has_no_reader:
                self._abandon(mailbox)
            elif request.finished:
                del self._mailboxes[request]

    def _fail(self, failure: BaseException) -> None:
        """The model does not run: everybody is told, and nobody is left behind."""
        told, self._mailboxes = self._mailboxes, {}
        for mailbox in told.values():
            mailbox.fail(failure)
        for request in told:
            self.llm.engine.abort(request.group.request_id)


class _Mailbox:
    """The newest output of one request, from the engine's thread to one reader in an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.request: Request | None = None
        self.has_no_reader = False  # its event loop is closed
        self._loop = loop
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._output: RequestOutput | Exception | None = None

    def offer(self, request: Request) -> None:
        """Leave the request's output, if the last one has been taken or this is the last of all."""
        with self._lock:
            is_free = self._output is None
        if is_free or request.finished:
            self._put(request.output())

    def fail(self, failure: BaseException) -> None:
        if not isinstance(failure, Exception):  # what ends a thread is not meant for the reader's
            cause, failure = failure, RuntimeError(f"the engine raised {type(failure).__name__}")
            failure.__cause__ = cause
        self._put(failure)

    def _put(self, output: RequestOutput | Exception) -> None:
        with self._lock:
            self._output = output
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            self.has_no_reader = True

    async def take(self) -> RequestOutput:
        output = None
        while output is None:  # one that was replaced before it was taken has rung twice
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                output, self._output = self._output, None
        if isinstance(output, Exception):
            raise output
        return output


def _news(output: RequestOutput, seen: RequestOutput | None) -> RequestOutput:
    """What `output` has beyond `seen`."""
    if seen is None:
        return output
    before = {completion.index: completion for completion in seen.outputs}
    fresh = []
    for completion in output.outputs:
        known = before.get(completion.index)
        if known is not None:
            logprobs = completion.logprobs
            completion = replace(
                completion,
                text=completion.text[len(known.text) :],
                token_ids=completion.token_ids[len(known.token_ids) :],
                logprobs=None if logprobs is None else logprobs[len(known.token_ids) :],
            )
        fresh.append(completion)
    return replace(output, outputs=fresh)
