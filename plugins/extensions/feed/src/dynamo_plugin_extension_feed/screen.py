"""The screen of `dynamo top`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar
from urllib.parse import quote

from dynamo_core.errors import ConfigError
from dynamo_http import reason_of
from rich.cells import cell_len
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import ScrollableContainer
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from dynamo_plugin_extension_feed.tables import (
    MODELS,
    REQUESTS,
    TENANTS,
    WORKERS,
    Column,
    Row,
    Table,
    alarm,
    figures,
    free,
    worker_lines,
)
from dynamo_plugin_extension_feed.why import PATH, history_lines

#: Asks the frontend: method, path; status and answer. Raises `ConfigError`.
Ask = Callable[[str, str], Awaitable[tuple[int, Any]]]

#: What looks wrong.
_ERROR = "bold $text-error"

VIEWS = (WORKERS, MODELS, REQUESTS, TENANTS)

_HELP = """1 2 3 4    workers, models, requests, tenants
Tab        the next view
Up, Down, PgUp, PgDn, Home, End, Left, Right
           move
s          sort by the next column
r          turn the order round
/          filter: rows that have all words; Enter keeps it, Escape clears it
Enter      open the worker or the request
p          pause, and go on
q          end"""


class _Lines(ScrollableContainer):
    """Lines that are wider than the screen are moved sideways: wrapped, a table could not be read."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "page_left", "Left"),
        Binding("right", "page_right", "Right"),
    ]


class Detail(ModalScreen[None]):
    """Text over the screen, until a key closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "Close")]
    CSS = """
    Detail { align: center middle; }
    Detail _Lines { width: 96%; height: 90%; border: round $accent; padding: 0 1; }
    Detail Static { width: auto; }
    """

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def compose(self) -> ComposeResult:
        with _Lines():
            yield Static(Text("\n".join(self.lines), no_wrap=True))
        yield Footer()


class Top(App[None]):
    """Looks every `interval` seconds, and shows one of the views."""

    TITLE = "dynamo top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #summary { height: 2; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.open { display: block; }
    #where { height: 1; padding: 0 1; color: $text-muted; }
    DataTable { height: 1fr; }
    DataTable.old { opacity: 50%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "view(0)", "Workers"),
        Binding("2", "view(1)", "Models"),
        Binding("3", "view(2)", "Requests"),
        Binding("4", "view(3)", "Tenants"),
        Binding("tab", "next_view", show=False, priority=True),
        Binding("s", "sort", "Sort"),
        Binding("r", "turn", "Turn"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("p", "pause", show=False),
        Binding("question_mark", "help", "Keys", key_display="?"),
        Binding("escape", "clear", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, ask: Ask, interval: float, state: Row) -> None:
        """`state` is what is shown first."""
        super().__init__()
        self._ask = ask
        self._interval = interval
        self._state = state
        self._view = 0
        #: By view: the column that it is sorted by, and whether the largest comes first.
        self._orders = [(0, False), (0, False), (0, True), (2, True)]
        #: What the table has: what its rows are known by, their texts, and the widths of its columns.
        self._keys: Sequence[str] = []
        self._cells: Sequence[Sequence[str]] = []
        self._widths: Sequence[int] = []
        self._paused = False
        #: That the state is old, since when, and why; empty if it is not.
        self._trouble = ""

    @property
    def view(self) -> Table:
        """The text on the screen."""
        return VIEWS[self._view]

    def compose(self) -> ComposeResult:
        yield Static(id="summary")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Input(placeholder="filter", id="filter", compact=True)
        yield Static(id="where")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Begin to look."""
        self._begin_view()
        self.query_one(DataTable).focus()
        self.run_worker(self._look(), exclusive=True, group="look")

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            if not self._paused:
                await self.refresh_state()

    async def refresh_state(self) -> None:
        """Ask once. That the frontend does not answer is told, and what is known stays."""
        try:
            status, answer = await self._ask("GET", "/admin/state")
        except ConfigError as error:
            # Who was asked is known, and there is little room.
            self._miss("NO ANSWER", str(error).rpartition(": ")[2])
        else:
            if status == 200:
                self._state, self._trouble = answer, ""
            else:
                self._miss("REFUSED", f"{reason_of(answer)} ({status})")
        self._show()

    def _miss(self, what: str, why: str) -> None:
        if not self._trouble:
            self._since = time.strftime("%H:%M:%S")
        self._trouble = f"{what} since {self._since}, figures are old: {why}"

    def _begin_view(self) -> None:
        self._widths = [cell_len(one.title) + 2 for one in self.view.columns]
        self._begin_table([])
        self._show()

    def _show(self) -> None:
        table = self.query_one(DataTable)
        column, turned = self._orders[self._view]
        words = self.query_one("#filter", Input).value
        rows = self.view.rows(self._state, words, column, turned)
        cells = [self.view.cells(row) for row in rows]
        chosen = self._chosen()
        widths = [max([known, *map(cell_len, texts)]) for known, *texts in zip(self._widths, *cells, strict=True)]
        if widths != self._widths or len(cells) < len(self._cells):
            self._widths = widths
            self._begin_table(cells)
        else:
            self._change(cells)
        self._keys = [self.view.key(row) for row in rows]
        if chosen in self._keys:
            table.move_cursor(row=self._keys.index(chosen), scroll=False)
        table.set_class(bool(self._trouble), "old")
        self.query_one("#summary", Static).update(self._summary())
        self._show_position(len(rows), words)

    def _summary(self) -> Content:
        """Return two lines about all: the state, then the worst alarm, if it is not that there is no state."""
        running = free(self._state)
        workers = Content.styled(f"{running}/{len(self._state['workers'])} workers", "" if running else _ERROR)
        second = Content.styled(self._trouble, _ERROR) if self._trouble else Content(alarm(self._state))
        return Content("\n").join([workers + Content(f"  {figures(self._state)}"), second])

    def _begin_table(self, cells: Sequence[Sequence[str]]) -> None:
        """Make the table anew. Columns have widths, since a table that finds them reads all rows for each cell."""
        table = self.query_one(DataTable)
        top = table.scroll_offset
        table.clear(columns=True)
        column, turned = self._orders[self._view]
        for index, (one, width) in enumerate(zip(self.view.columns, self._widths, strict=True)):
            mark = (" ▼" if turned else " ▲") if index == column else ""
            table.add_column(
                Text(one.title + mark, justify="right" if one.right else "left"), key=one.title, width=width
            )
        self._cells = []
        self._change(cells)
        table.scroll_to(top.x, top.y, animate=False)

    def _change(self, cells: Sequence[Sequence[str]]) -> None:
        """Write the cells that are other than before, and the rows that are new. Rows are known by their place."""
        table = self.query_one(DataTable)
        for place, (new, old) in enumerate(zip(cells, self._cells, strict=False)):
            if new != old:
                for one, text, before in zip(self.view.columns, new, old, strict=True):
                    if text != before:
                        table.update_cell(str(place), one.title, _cell(one, text))
        for place in range(len(self._cells), len(cells)):
            table.add_row(*map(_cell, self.view.columns, cells[place]), key=str(place))
        self._cells = cells

    def _show_position(self, shown: int, words: str) -> None:
        told = f"{self.view.name}: {shown} of {len(self._state[self.view.name])}"
        told += f", filter {words!r}" if words else ""
        told += ", paused" if self._paused else ""
        self.query_one("#where", Static).update(Text(told, no_wrap=True, overflow="ellipsis"))

    def _chosen(self) -> str | None:
        place = self.query_one(DataTable).cursor_row
        return self._keys[place] if place < len(self._keys) else None

    def action_view(self, index: int) -> None:
        """Show another view."""
        self._view = index
        self._keys = []
        self._begin_view()

    def action_next_view(self) -> None:
        """Show the view after this one."""
        self.action_view((self._view + 1) % len(VIEWS))

    def action_sort(self) -> None:
        """Sort by the next column. Numbers begin with the largest."""
        column = (self._orders[self._view][0] + 1) % len(self.view.columns)
        self._orders[self._view] = column, self.view.columns[column].right
        self._begin_view()

    def action_turn(self) -> None:
        """Turn the order round."""
        column, turned = self._orders[self._view]
        self._orders[self._view] = column, not turned
        self._begin_view()

    def action_filter(self) -> None:
        """Ask for words."""
        box = self.query_one("#filter", Input)
        box.add_class("open")
        box.focus()

    def action_clear(self) -> None:
        """Show all rows again."""
        box = self.query_one("#filter", Input)
        box.value = ""
        box.remove_class("open")
        self.query_one(DataTable).focus()

    def action_pause(self) -> None:
        """Pause the screen, or go on."""
        self._paused = not self._paused
        self._show()

    def action_help(self) -> None:
        """Tell all keys."""
        self.push_screen(Detail(_HELP.splitlines()))

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        self._show()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter."""
        self.query_one(DataTable).focus()

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open a worker or a request."""
        chosen = self._chosen()
        row = next((row for row in self._state[self.view.name] if self.view.key(row) == chosen), None)
        if row is None:
            return
        if self.view is WORKERS:
            self.push_screen(Detail(worker_lines(row)))
        elif self.view is REQUESTS:
            self.push_screen(Detail(await self._story(row["id"])))

    async def _story(self, request_id: str) -> list[str]:
        try:
            status, answer = await self._ask("GET", f"{PATH}/{quote(request_id, safe='')}")
        except ConfigError as error:
            return [str(error)]
        return list(history_lines(answer)) if status == 200 else [f"no frontend knows request {request_id} any more"]


def _cell(column: Column, text: str) -> Text:
    return Text(text, justify="right" if column.right else "left")
