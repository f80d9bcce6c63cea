"""Many clients of one engine: each gets its own tokens and one last output, whoever comes, waits or leaves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from octavo import LLM, SamplingParams
from octavo.models.async_llm import AsyncLLM
from octavo.scheduler.engine import Request
from octavo.tests.models.tiny import VOCAB, TinyModel


class TinyLLM(LLM):
    """Token ids in, token ids out."""

    def __init__(self, tiny: TinyModel, **config) -> None:
        self.engine = tiny.engine(**config)
        self.adapters, self.pool = None, self.engine._runner.pool
        self._ids, self._changed = itertools.count(), {}


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel()


def params(max_tokens: int = 6, **more) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **more}
    )


async def last(outputs):
    output = None
    async for each in outputs:
        output = each
    return output


def tokens_of(output) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def solo(tiny, prompt, asked) -> list[list[int]]:
    [output] = TinyLLM(tiny).generate([prompt], asked)
    return tokens_of(output)


def test_outputs_grow_to_what_the_llm_returns(tiny):
    async def run():
        async with AsyncLLM(TinyLLM(tiny)) as llm:
            return [output async for output in llm.generate([5, 6, 7], params(9))]

    outputs = asyncio.run(run())
    assert tokens_of(outputs[-1]) == solo(tiny, [5, 6, 7], params(9))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(set(lengths))


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "n": 3, "seed": 5}], ids=["one", "three"])  # fmt: skip
def test_deltas_add_up(tiny, more):
    """Token ids, texts and log probabilities."""
    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    whole = TinyLLM(tiny)
    whole.engine._tokenizer = tokenizer
    [first] = whole.generate([[5, 6, 7]], params(9, logprobs=1, **more))
    asked = params(9, logprobs=1, stop=[f"w{first.outputs[-1].token_ids[6]}"], **more)
    [expected] = whole.generate([[5, 6, 7]], asked)

    async def run():
        llm = TinyLLM(tiny)
        llm.engine._tokenizer = tokenizer
        async with AsyncLLM(llm) as serving:
            return [output async for output in serving.generate([5, 6, 7], asked, delta=True)]

    added = {index: ("", [], []) for index in range(asked.n)}
    outputs = asyncio.run(run())
    for output in outputs:
        for completion in output.outputs:
            text, ids, logprobs = added[completion.index]
            added[completion.index] = (
                text + completion.text,
                ids + completion.token_ids,
                logprobs + [list(each) for each in completion.logprobs or ()],
            )
    assert len(outputs) > 2 and expected.outputs[-1].finish_reason == "stop"
    for completion in expected.outputs:
        ids = [list(each) for each in completion.logprobs or ()]
        assert added[completion.index] == (completion.text, completion.token_ids, ids)


@pytest.mark.parametrize(
    "asked",
    [
        params(5, temperature=1.0, n=1, best_of=3, seed=5),
        params(5, use_beam_search=True, n=2, ignore_eos=False),
    ],
    ids=["best of", "beams"],
)
def test_completions_that_compete_come_when_it_is_decided(tiny, asked):
    async def run():
        async with AsyncLLM(TinyLLM(tiny)) as llm:
            return [output async for output in llm.generate([5, 6, 7], asked, delta=True)]

    [output] = asyncio.run(run())
    assert output.finished and tokens_of(output) == solo(tiny, [5, 6, 7], asked)


@pytest.mark.parametrize("ahead", [False, True], ids=["serial", "overlapped"])
def test_64_clients_some_of_which_leave(tiny, ahead):
    """Every request has one terminal event, what stayed has its own tokens, and the pools are at their baseline."""
    rng, happened = random.Random(1), Counter()
    llm = AsyncLLM(TinyLLM(tiny, num_gpu_blocks=60, max_num_seqs=8, async_scheduling=ahead))
    step, ended = llm.llm.engine.step, Counter()

    def counted():
        changed = step()
        ended.update(request.group.request_id for request in changed if request.finished)
        return changed

    llm.llm.engine.step = counted

    async def client(number: int):
        await asyncio.sleep(rng.random() * 0.3)
        prompt = [4 + number % 5, *(rng.randrange(4, 60) for _ in range(rng.randint(1, 12)))]
        asked = params(rng.randint(1, 12), **rng.choice([{}, {"temperature": 1.0, "n": 2, "seed": number}]))  # fmt: skip
        leaves = rng.choice([None, None, 0, 1, 2])
        outputs = llm.generate(prompt, asked)
        try:
            count = 0
            async for output in outputs:
                assert output.request_id
                if leaves is not None and count == leaves:
                    happened["left"] += 1
                    return None
                count += 1
                if rng.random() < 0.2:
                    await asyncio.sleep(0.01)  # a slow reader
        finally:
            await outputs.aclose()
        return prompt, asked, tokens_of(output)

    async def run():
        tasks = [asyncio.create_task(client(number)) for number in range(64)]
        await asyncio.sleep(0.2)
        for task in rng.sample(tasks, 10):
            happened["cancelled"] += task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(500):
            stats = await llm.stats()
            if stats.num_running + stats.num_waiting + stats.num_used_blocks == 0:
                break
            await asyncio.sleep(0.01)
        await llm.aclose()
        return done

    done = asyncio.run(run())
    answers = [result for result in done if isinstance(result, tuple)]
    assert happened["left"] > 5 and len(answers) > 15
    assert all(isinstance(r, (tuple, asyncio.CancelledError, type(None))) for r in done), done
    for prompt, asked, tokens in answers:
        assert tokens == solo(tiny, prompt, asked)
    assert set(ended.values()) == {1} and not llm._mailboxes
    assert llm.llm.engine.scheduler.blocks.num_used_blocks == 0


def ends_of(llm: AsyncLLM) -> list[str]:
    """How the requests of `llm` end, as they do."""
    step, ends = llm.llm.engine.step, []

    def watched():
        changed = step()
        ends.extend(r.output().outputs[0].finish_reason for r in changed if r.finished)
        return changed

    llm.llm.engine.step = watched
    return ends


@pytest.mark.parametrize("way", ["break", "aclose", "cancel", "loop"])
def test_leaving_aborts(tiny, way):
    async def leave(llm):
        outputs = llm.generate([5, 6], params(240))
        if way == "cancel":
            reader = asyncio.create_task(last(outputs))
            while not (await llm.stats()).num_running:
                await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            return
        async for _ in outputs:
            break
        if way == "aclose":
            await outputs.aclose()

    with contextlib.closing(AsyncLLM(TinyLLM(tiny))) as llm:
        ends = ends_of(llm)
        if way == "loop":
            outputs, loop = llm.generate([5, 6], params(240)), asyncio.new_event_loop()
            loop.run_until_complete(anext(outputs))
            loop.close()
        else:

            async def leave_and_stay() -> None:  # a loop that goes away would do the same
                await leave(llm)
                while not ends:
                    await asyncio.sleep(0.01)

            asyncio.run(asyncio.wait_for(leave_and_stay(), 30))
        for _ in range(1000):
            if ends:
                break
            time.sleep(0.01)
    assert ends == ["abort"]


def test_outputs_that_nobody_takes_are_not_made(tiny, monkeypatch):
    made, output = [], Request.output
    monkeypatch.setattr(Request, "output", lambda self: made.append(1) or output(self))

    async def run():
        async with AsyncLLM(TinyLLM(tiny)) as llm:
            outputs = llm.generate([5, 6], params(60))
            await anext(outputs)
            while (await llm.stats()).num_running:
                await asyncio.sleep(0.01)
            return (await last(outputs)).outputs[0].token_ids

    assert len(asyncio.run(run())) == 60 and len(made) <= 3


def test_a_slow_reader_gets_fewer_outputs_and_holds_up_nobody(tiny):
    async def run():
        async with AsyncLLM(TinyLLM(tiny)) as llm:
            slow, seen = llm.generate([5, 6], params(60)), []
            async for output in slow:
                seen.append(len(output.outputs[0].token_ids))
                if len(seen) == 1:
                    quick = await last(llm.generate([7, 8, 9], params(80)))
            return seen, quick

    seen, quick = asyncio.run(run())
    assert len(quick.outputs[0].token_ids) == 80, "it began later and is longer"
    assert len(seen) < 10 and seen[-1] == 60


def test_a_bad_request_is_its_own_clients_error(tiny):
    async def run():
        async with AsyncLLM(TinyLLM(tiny)) as llm:
            good = asyncio.create_task(last(llm.generate([5, 6], params(9))))
            for nothing in ([], 5, None, [[5], [6]]):
                with pytest.raises(ValueError, match="prompt"):
                    await last(llm.generate(nothing, params()))
            for bad in ("greedy", [params()]):
                with pytest.raises(ValueError, match="sampling_params: expected"):
                    await last(llm.generate([5], bad))
            return await good

    assert tokens_of(asyncio.run(run())) == solo(tiny, [5, 6], params(9))


def test_closing_ends_what_is_unfinished(tiny):
    closed: list[bool] = []

    async def run():
        llm = AsyncLLM(TinyLLM(tiny))
        tasks = [asyncio.create_task(last(llm.generate([5, i], params(200)))) for i in range(5)]
        await asyncio.sleep(0.05)
        llm.llm.close = lambda: closed.append(llm._thread.is_alive())
        await llm.aclose()
        assert closed == [False], "after the last step"
        await llm.aclose()
        outputs = await asyncio.gather(*tasks)
        with pytest.raises(RuntimeError, match="closed"):
            await last(llm.generate([5], params()))
        return llm, outputs

    llm, outputs = asyncio.run(run())
    assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
    assert not llm._thread.is_alive() and llm.llm.engine.scheduler.blocks.num_used_blocks == 0


def test_a_model_that_fails_is_told_to_all_and_to_nobody_after(tiny):
    async def run():
        async with AsyncLLM(TinyLLM(tiny)) as llm:
            runner = llm.llm.engine._runner
            launch, fails = runner.launch, [True]

            def launched(*args, **kwargs):
                if fails[0]:
                    raise OSError("the device is gone")
                return launch(*args, **kwargs)

            runner.launch = launched
            tasks = [last(llm.generate([5, i], params())) for i in range(3)]
            failed = await asyncio.gather(*tasks, return_exceptions=True)
            fails[0] = False
            return failed, await last(llm.generate([5, 6], params()))

    failed, output = asyncio.run(run())
    assert [str(failure) for failure in failed] == ["the device is gone"] * 3
    assert tokens_of(output) == solo(tiny, [5, 6], params())


def test_failures_apart_are_got_over(tiny):
    async def run():
        async with AsyncLLM(TinyLLM(tiny)) as llm:
            runner, count = llm.llm.engine._runner, itertools.count()
            launch = runner.launch

            def launched(*args, **kwargs):
                if next(count) in (2, 5):
                    raise OSError("just now and then")
                return launch(*args, **kwargs)

            runner.launch = launched
            return await last(llm.generate([5, 6], params()))

    assert tokens_of(asyncio.run(run())) == solo(tiny, [5, 6], params())


@pytest.mark.parametrize("failure", [RuntimeError("no text"), MemoryError()], ids=repr)
def test_an_output_that_cannot_be_made_is_its_own_clients_error(tiny, monkeypatch, failure):
    output = Request.output

    def made(request):
        if request.group.seqs[0].prompt_token_ids[-1] == 7:
            raise failure
        return output(request)

    async def run():
        async with AsyncLLM(TinyLLM(tiny)) as llm:
            ended, step = [], llm.llm.engine.step

            def watched():
                changed = step()
                ended.extend(r.group.seqs[0].num_output_tokens for r in changed if r.finished)
                return changed

            llm.llm.engine.step = watched
            asked = [last(llm.generate([5, i], params(30))) for i in (6, 7)]
            done = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)
            return done, ended

    monkeypatch.setattr(Request, "output", made)
    (good, bad), ended = asyncio.run(run())
    assert bad is failure and ended[0] < 9 and ended[1:] == [30]
    monkeypatch.undo()
    assert tokens_of(good) == solo(tiny, [5, 6], params(30))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_nothing_ends_the_engines_thread_but_closing(tiny, kind):
    """What ends a thread or a task is told to the clients as an error like any other, and others come after them."""

    async def run():
        async with AsyncLLM(TinyLLM(tiny)) as llm:
            runner = llm.llm.engine._runner
            launch = runner.launch

            def launched(*args, **kwargs):
                raise kind

            runner.launch = launched
            asked = [last(llm.generate([5, i], params())) for i in range(3)]
            done = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)
            runner.launch = launch
            return done, await asyncio.wait_for(last(llm.generate([5, 6], params())), 30)

    failed, output = asyncio.run(run())
    assert [str(failure) for failure in failed] == [f"the engine raised {kind.__name__}"] * 3
    assert tokens_of(output) == solo(tiny, [5, 6], params())


def test_closing_ends_though_no_step_succeeds(tiny):
    async def run():
        llm = AsyncLLM(TinyLLM(tiny))
        outputs = llm.generate([5, 6], params(100))
        await anext(outputs)

        def step():
            raise OSError("gone")

        llm.llm.engine.step = step
        await asyncio.wait_for(llm.aclose(), 30)
        with pytest.raises(OSError, match="gone"):
            await last(outputs)

    asyncio.run(run())


def test_loops_that_are_gone_leave_nothing_behind(tiny):
    with contextlib.closing(AsyncLLM(TinyLLM(tiny))) as llm:
        never = llm.generate([5, 6], params())
        loop = asyncio.new_event_loop()
        begun = llm.generate([5, 6], params(200))
        loop.run_until_complete(anext(begun))
        loop.close()

        async def others():
            while (await llm.stats()).num_running:
                await asyncio.sleep(0.01)
            output = await last(llm.generate([5, 7], params()))
            return await llm.stats(), output

        stats, output = asyncio.run(asyncio.wait_for(others(), 30))
        assert stats.num_waiting == stats.num_used_blocks == 0 and not llm._mailboxes
        assert tokens_of(output) == solo(tiny, [5, 7], params())
        del never


def test_an_llm_takes_no_further_arguments(tiny):
    with pytest.raises(ValueError, match="model: expected a name with block_size, got an LLM"):
        AsyncLLM(TinyLLM(tiny), block_size=4)
