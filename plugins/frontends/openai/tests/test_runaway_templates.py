"""Chat templates that do not end, or take all memory: stopped, told by name, and no burden on other requests."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from asyncio import events
from pathlib import Path
from typing import Any

import pytest
from dynamo_core.errors import InvalidArgument, Unavailable, Unknown
from dynamo_generation.templates import child as template_child
from dynamo_generation.templates import inline_rendering as template_inline
from dynamo_generation.templates import render_processes as template_process
from dynamo_generation.templates.errors import TemplateFault
from dynamo_generation.templates.inline_rendering import MAX_ITEMS, RenderLimitExceeded
from dynamo_generation.templates.template import DEFAULT_TEMPLATE, ChatTemplate, TemplateStore

USER = [{"role": "user", "content": "Hi"}]
#: Seconds of the loop's own time that one callback may take.
LONGEST = 0.500
LOOP, LONG = "{% for i in range(20000) %}", "{% for i in range(100000) %}"
END = "{% endfor %}"

#: None of these may hold the event loop. Some end in a process of their own, some do not end in time.
RUNAWAYS = {
    "nested loops": f"{LOOP * 3}x{END * 3}",
    "nested loops that write nothing": f"{LOOP * 3}{END * 3}",
    "loops of the longest range": f"{LONG * 2}{{{{ i }}}}{END * 2}",
    "a loop whose condition never holds": LOOP
    + "{% for j in range(20000) if j|string|length > i|string|length + 9 %}x"
    + END * 2,
    "macros that call each other": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a macro without end": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a recursive loop": "{% for x in [[1] * 3] * 3 recursive %}{{ loop([[1] * 3] * 3) }}{% endfor %}",
    "filters for each item": "{{ range(20000)|map('string')|map('center', 9999)|map('upper')|list|length }}" * 50,
    "tests for each item": "{{ range(20000)|select('in', range(20000)|list)|list|length }}" * 50,
    "a text that doubles": "{% set ns = namespace(t='xy') %}" + LOOP + "{% set ns.t = ns.t ~ ns.t %}" + END,
    "a text that doubles by adding": "{% set ns = namespace(t='xy') %}" + LOOP + "{% set ns.t = ns.t + ns.t %}" + END,
    "a text that doubles in a macro": "{% macro f(t, n) %}{% if n %}{{ f(t + t, n - 1) }}{% endif %}{% endmacro %}"
    "{{ f('xy', 60) }}",
    "a list that doubles": "{% set ns = namespace(t=[1]) %}" + LOOP + "{% set ns.t = ns.t + ns.t %}" + END,
    "lists inside each other": "{% set ns = namespace(t=[1]) %}"
    + "{% for i in range(60) %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.t }}",
    "objects inside each other": "{% set ns = namespace(t={}) %}"
    + "{% for i in range(60) %}{% set ns.t = dict(a=ns.t, b=ns.t) %}{% endfor %}{{ ns.t|tojson }}",
    "a large product": "{{ 'x' * 10000000000 }}",
    "a large product of a list": "{{ ([0] * 10000000000)|length }}",
    "a large range": "{{ range(1000000000)|list|length }}",
    "a large power": "{{ 10 ** 10 ** 10 }}",
    "numbers that square": "{% set ns = namespace(n=10) %}"
    + LOOP
    + "{% set ns.n = ns.n * ns.n %}"
    + END
    + "{{ ns.n > 1 }}",
    "a wide field": "{{ '%1000000000d' % 1 }}",
    "a wide field of format": "{{ '{:1000000000}'.format(1) }}",
    "a wide text": "{{ 'x'|center(10000000000) }}",
    "a wide method": "{{ 'x'.ljust(10000000000) }}",
    "a wide method under another name": "{% set f = 'x'.ljust %}{{ f(10000000000) }}",
    "a wide indent": "{{ ('x\\n' * 1000)|indent(1000000000) }}",
    "a replacement that grows": "{% set ns = namespace(t='x') %}"
    + LOOP
    + "{% set ns.t = ns.t|replace('x', 'xx') %}"
    + END,
    "a replacement by a method": "{% set ns = namespace(t='x') %}"
    + LOOP
    + "{% set ns.t = ns.t.replace('x', 'xx') %}"
    + END,
    "a text joined with itself": "{% set ns = namespace(t='x') %}"
    + LOOP
    + "{% set ns.t = [ns.t, ns.t, 1]|join %}"
    + END,
    "texts joined by a method": "{% set ns = namespace(t='x') %}"
    + LOOP
    + "{% set ns.t = ns.t.join(['x', 'x', ns.t]) %}"
    + END,
    "blocks that double": "{% set t = 'xy' %}" + "{% set t %}{{ t }}{{ t }}{% endset %}" * 60 + "{{ t|length }}",
    "an answer without end": LOOP * 2 + "{{ 'x' * 1000 }}" + END * 2,
    "many words": "{{ lipsum(n=10000000) }}",
    "deep loops": "{% for a in range(9) %}" * 18 + "x" + "{% endfor %}" * 18,
}

#: What models do, in ways of their own. Shown on the event loop, and the same as without bounds.
SOUND = {
    "the default": DEFAULT_TEMPLATE,
    "sums": "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' + '</' + m.role + '>' }}"
    "{% endfor %}",
    "joined": "{% for m in messages %}{{ '<' ~ m.role ~ loop.index ~ '>' ~ m.content|trim ~ none }}{% endfor %}",
    "lists": "{% set all = [{'role': 'system', 'content': 'x'}] + messages %}{% for m in all[1:] %}"
    "{{ m.content }}{% endfor %}{{ (1, messages[0].role) }}",
    "a namespace": "{% set ns = namespace(n=0, t='') %}{% for m in messages if m.role != 'x' %}"
    "{% set ns.n = ns.n + 1 %}{% set ns.t = ns.t + m.content %}{% endfor %}{{ ns.n % 2 }}{{ ns.t }}"
    "{{ 3 * 4 }}{{ 1.5 * 2 }}",
    "a macro": "{% macro say(m, mark='!') %}{{ m.role }}{{ mark }}{{ caller() if caller else '' }}{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% call say(m, '?') %}c{% endcall %}{% endfor %}",
    "methods": "{{ messages[0].content.split('i')[0].strip('H').replace('x', 'y').upper().join(['a', 'b']) }}"
    "{{ 'a,b'.split(',')|join('-') }}{{ messages[0].items()|list }}",
    "filters": "{{ messages|map(attribute='role')|join(', ') }}"
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ [3, 1, 2]|sort|first }}"
    "{{ 'a\nb'|indent(2) }}{{ messages|map('tojson')|join }}{{ {'b': 1, 'a': 2}|dictsort }}"
    "{{ '  x '|trim }}{{ [1, 2]|sum }}{{ messages|tojson(indent=2) }}",
    "marks": "{% generation %}{{ bos }}{% endgeneration %}{% for m in messages %}{% if loop.last %}{% break %}"
    "{% endif %}{% endfor %}{% set t %}a{{ messages[0].role }}{% endset %}{{ t }}",
    "undefined": "{{ nothing }}{{ nothing is defined }}{{ nothing|default('d') }}{{ messages[9] }}",
    "a recursive loop": "{% for x in [[1, []], [2, []]] recursive %}{{ x[0] }}{{ loop(x[1]) }}{% endfor %}",
    "dictionaries": "{{ dict(a=1, b=messages)|length }}{{ range(3)|list }}{{ {'a': messages[0].role} }}",
}


@pytest.fixture
async def store() -> Any:
    store = TemplateStore(1.0)
    yield store
    await store.aclose()


@pytest.fixture
async def patient() -> Any:
    """Return limits for templates that end: their process has all the time that a busy machine may need."""
    store = TemplateStore(30.0)
    yield store
    await store.aclose()


async def render(store: TemplateStore, template: ChatTemplate, *, long: bool = False, **options: Any) -> str:
    def values() -> dict[str, Any]:
        return template.values(USER * 2, **options)

    text = None if long else store.render_now(template, values())
    if text is not None:
        return text
    return await store.render(template, values, tools="tools" in options, long=long)


class Watched:
    """Notes the longest callback of the loop, in seconds of its own processor time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.longest = 0.0
        original = events.Handle._run

        def timed(handle: events.Handle) -> None:
            begun = time.thread_time()
            original(handle)
            self.longest = max(self.longest, time.thread_time() - begun)

        patch.setattr(events.Handle, "_run", timed)


@pytest.mark.parametrize("name", RUNAWAYS)
def test_a_template_that_runs_away_is_given_up_on_the_loop_in_no_time(name: str) -> None:
    template = ChatTemplate(RUNAWAYS[name])
    begun = time.thread_time()

    with pytest.raises((RenderLimitExceeded, InvalidArgument)):
        # Python has a bound of its own for calls inside each other.
        template.render(template.values(USER))

    assert time.thread_time() - begun < LONGEST


def test_a_template_that_runs_away_is_given_up_where_the_processor_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_inline, "perf_counter", lambda: 5 * time.thread_time())
    template = ChatTemplate(RUNAWAYS["nested loops"])
    begun = time.thread_time()

    with pytest.raises(RenderLimitExceeded):
        template.render(template.values(USER))

    assert time.thread_time() - begun < LONGEST


@pytest.mark.full
@pytest.mark.parametrize("name", RUNAWAYS)
async def test_a_template_that_runs_away_is_stopped(
    store: TemplateStore, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(RUNAWAYS[name], name="The chat template of model 'm'")
    watched = Watched(monkeypatch)

    try:
        text = await render(store, template)
    except TemplateFault as error:
        assert error.message.startswith("The chat template of model 'm' was stopped: it ")  # noqa: PT017
    except InvalidArgument:
        # The template, or Python, has a bound of its own for this.
        pass
    else:
        assert len(text) < 100_000_000

    assert watched.longest < LONGEST


async def test_a_sound_template_renders_the_same_inline_and_in_a_process(patient: TemplateStore) -> None:
    for name, source in SOUND.items():
        template = ChatTemplate(source, {"bos": "<s>"})

        inline = template.render(template.values(USER * 2))

        assert inline == await render(patient, template, long=True), name


async def test_a_template_that_is_not_for_the_loop_is_rendered_all_the_same(patient: TemplateStore) -> None:
    template = ChatTemplate(
        "{{ 'x'.center(5) }}{{ 2 ** 3 }}{% for i in range(30000) %}{% if loop.last %}{{ i }}{% endif %}{% endfor %}"
    )

    assert await render(patient, template) == "  x  829999"


async def test_tools_have_their_own_template_in_a_process_too(patient: TemplateStore) -> None:
    template = ChatTemplate("none", None, "{{ tools|length ** 1 }}")

    assert await render(patient, template, tools=[{}, {}]) == "2"
    assert await render(patient, template, long=True) == "none"


async def test_a_templates_refusal_is_reported_from_a_process_too(patient: TemplateStore) -> None:
    with pytest.raises(InvalidArgument, match="refused the messages: roles must alternate") as caught:
        await render(patient, ChatTemplate("{{ raise_exception('roles must alternate') }}"), long=True)

    assert caught.value.field == "messages"


async def test_half_a_character_is_refused_by_a_process(patient: TemplateStore) -> None:
    with pytest.raises(InvalidArgument, match="surrogates"):
        await render(patient, ChatTemplate(r"{{ '\ud800' }}"), long=True)


async def test_a_fault_that_only_compiling_shows_is_the_models(patient: TemplateStore) -> None:
    with pytest.raises(Unknown, match="template is broken"):
        await render(patient, ChatTemplate("{{ 1|no_such_filter }}"))


@pytest.mark.parametrize("source", ["{% for a in b %}" * 30 + "{% endfor %}" * 30, "x" * 300_000, "{{ " + "(" * 5000])
def test_a_template_that_cannot_be_compiled_is_the_models_fault(source: str) -> None:
    with pytest.raises(Unknown, match="template is broken"):
        ChatTemplate(source)


async def test_memory_is_bounded(store: TemplateStore) -> None:
    """In a process of its own, before the time is over."""
    template = ChatTemplate("{{ ('x' * 3000000000)|length }}", name="The chat template of model 'm'")

    with pytest.raises(TemplateFault, match="model 'm' was stopped: it needed more than 2 GB of memory"):
        await render(store, template)


async def test_after_a_process_was_stopped_the_next_conversation_has_another(store: TemplateStore) -> None:
    with pytest.raises(TemplateFault):
        await render(store, ChatTemplate(RUNAWAYS["nested loops"]))

    assert await render(store, ChatTemplate("{{ messages|length }}"), long=True) == "2"


@pytest.mark.parametrize("megabytes", [0, 200])
async def test_one_process_serves_many_conversations_of_a_large_frontend(
    store: TemplateStore, monkeypatch: pytest.MonkeyPatch, megabytes: int
) -> None:
    memory = b"x" * (megabytes << 20)
    started: list[object] = []
    original = template_process.LimitedProcess

    def start(*arguments: Any) -> Any:
        started.append(None)
        return original(*arguments)

    monkeypatch.setattr(template_process, "LimitedProcess", start)
    template = ChatTemplate("{{ messages|length }}{{ n }}")

    texts = [await render(store, template, long=True, variables={"n": number}) for number in range(5)]

    assert texts == [f"2{number}" for number in range(5)]
    assert len(started) == 1
    del memory


async def test_the_start_time_of_a_process_does_not_count_against_the_template(
    store: TemplateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = template_process.LimitedProcess._wait_for_start

    def wait(process: template_process.LimitedProcess) -> None:
        time.sleep(store._processes._timeout + 0.2)
        original(process)

    monkeypatch.setattr(template_process.LimitedProcess, "_wait_for_start", wait)

    assert await render(store, ChatTemplate("{{ messages|length }}"), long=True) == "2"


async def test_a_machine_that_starts_no_process_is_unavailable(
    store: TemplateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "STARTS", 0.0)

    with pytest.raises(Unavailable, match="Too many long conversations wait"):
        await render(store, ChatTemplate("{{ messages|length }}"), long=True)


async def test_other_templates_render_beside_a_runaway_one(store: TemplateStore) -> None:
    runaway = ChatTemplate(RUNAWAYS["nested loops"])
    attacks = [asyncio.create_task(render(store, runaway)) for _ in range(10)]
    await asyncio.sleep(0)

    assert await render(store, ChatTemplate("{{ messages|length }}"), long=True) == "2"
    waiting = [task for task in attacks if not task.done()]
    results = await asyncio.gather(*attacks, return_exceptions=True)

    assert waiting
    assert {type(result) for result in results} <= {TemplateFault, Unavailable}


async def test_a_template_that_ran_away_is_not_tried_on_the_loop_again_for_a_while(
    store: TemplateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(RUNAWAYS["nested loops"])
    with pytest.raises(TemplateFault):
        await render(store, template)
    tried: list[object] = []
    monkeypatch.setattr(template, "render", tried.append)

    with pytest.raises(TemplateFault):
        await render(store, template)

    assert tried == []


async def test_a_client_that_leaves_ends_the_process(store: TemplateStore) -> None:
    task = asyncio.create_task(render(store, ChatTemplate(RUNAWAYS["nested loops"])))
    await asyncio.sleep(0.3)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.aclose()

    assert await render(store, ChatTemplate("{{ 1 }}")) == "1"


def test_a_process_ends_with_its_parent() -> None:
    child = Path(template_process.__file__).with_name("child.py")
    process = subprocess.Popen([sys.executable, "-P", str(child)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    # That it has started, and no answer.
    assert process.communicate(timeout=20)[0] == template_child.LENGTH.pack(0)
    assert process.returncode == 0


#: A frontend as a process of its template sees it.
PARENT = """
import asyncio
from dynamo_core import TaskSet
from dynamo_generation.templates.render_processes import LimitedProcess

async def main():
    process = LimitedProcess(TaskSet())
    await process.start()
    print(process._process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_process_that_is_stopped_ends_with_its_parent_too() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        process = os.pidfd_open(pid)
        os.kill(pid, signal.SIGSTOP)
        parent.kill()

    ended, _, _ = select.select([process], [], [], 30)
    os.close(process)
    assert ended


def test_a_process_without_a_parent_ends_although_its_template_does_not() -> None:
    """The kernel bounds its processor time."""
    child = Path(template_process.__file__).with_name("child.py")
    job = json.dumps({"type": "Job", "source": RUNAWAYS["nested loops"], "values": {}, "seconds": 0.1}).encode()

    process = subprocess.run(
        [sys.executable, "-P", str(child)], input=len(job).to_bytes(8) + job, capture_output=True, timeout=50
    )

    assert process.returncode < 0


async def test_a_stopped_template_is_named_and_other_requests_are_served(cold_server: Any) -> None:
    cold_server.configure(template_timeout=0.5)
    files = {"chat_template.jinja": RUNAWAYS["nested loops"].encode()}
    cold_server.add_model("wild", files=files, checksum="1")
    cold_server.add_model().script = lambda call: call.finish(text="x")
    await cold_server.start()

    wild = asyncio.create_task(cold_server.chat(model="wild"))
    other = await cold_server.chat()
    reply = await wild

    assert other.status == 200
    assert reply.status == 500
    message = reply.json()["error"]["message"]
    assert "The chat template of model 'wild' (chat_template.jinja) was stopped" in message
    assert "frontend.template_timeout" in message


async def test_large_tools_are_rendered_off_the_loop(server: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.listener._body_limit = 1 << 24
    watched = Watched(monkeypatch)
    enum = {"type": "string", "enum": ["x"] * 20_000}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": enum}}}}
    files = {"chat_template.jinja": b"{{ tools|tojson|length }}"}
    server.add_model("t", files=files, checksum="9", context_length=100_000)
    server.directory.models["t"].script = lambda call: call.finish(text="x")

    reply = await server.chat(model="t", tools=[tool] * 5, nvext={"annotations": ["formatted_prompt"]})

    assert reply.status == 200, reply.body
    assert int(reply.json()["nvext"]["formatted_prompt"]) > 5 * 20_000 * 5
    assert watched.longest < LONGEST


def test_the_item_limit_is_above_the_inline_limit() -> None:
    assert MAX_ITEMS > 4096
