"""A stand-in for the API server of Kubernetes, on the loopback, in a thread of its own.

It does what Kubernetes documents of the few things that discovery uses: versions that only grow, listings in pages of
one version, watches from a version on with bookmarks and an end, 410 for a version that is forgotten, 409 for what
exists or has changed, preconditions, dry runs, the collecting of what has lost its owner, tokens and roles, limits of
sizes, and 429 with Retry-After. It is no proof that a real server agrees.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import ssl
import uuid
from base64 import b64decode
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web
from dynamo_core import LoopThread
from yarl import URL

Json = dict[str, Any]
T = TypeVar("T")

KINDS = {"leases": ("coordination.k8s.io/v1", "Lease"), "configmaps": ("v1", "ConfigMap"), "pods": ("v1", "Pod")}
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
MAX_BODY = 3 * 1024 * 1024 // 2
MAX_ANNOTATIONS = 256 * 1024
MAX_CONFIG_MAP = 1024 * 1024


class Refusal(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status: Json = {
            **{"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure"},
            **{"code": code, "reason": reason, "message": message},
        }


class ApiServer:
    """Everything that tests change may be changed from their thread."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._thread = LoopThread("kubernetes-stand-in", self._end)
        self._runner: web.AppRunner | None = None
        self._port = 0
        self.version = 100
        self.objects: dict[tuple[str, str], dict[str, Json]] = {}
        self.namespaces = {"default"}
        #: What a token may do: pairs of verb and resource; None is everything.
        self.tokens: dict[str, set[tuple[str, str]] | None] = {"all": None}
        self.requests: list[tuple[str, str]] = []
        #: The history for watches: version, resource, namespace, type and object.
        self._log: list[tuple[int, str, str, str, Json]] = []
        self._forgotten = 0
        self._changed: asyncio.Event = asyncio.Event()
        self._watches: set[asyncio.Task[Any]] = set()
        self._throttle: list[int] = []
        self._conflicts = 0
        self._silent = False
        self._down = False
        #: Counts how often connections were broken.
        self._cuts = 0
        self._silenced: set[asyncio.Task[Any]] = set()
        self._expiring_pages = 0
        #: Whether a watch of a forgotten version is refused with HTTP 410 instead of an event.
        self.gone_by_status = False
        self.page_limit: int | None = None

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self._port}"

    # What tests do.

    async def start(self) -> None:
        """Serve, with what it held."""
        self._down = False
        await self._thread.run(self._start())

    async def stop(self) -> None:
        """Stop: break connections, and every new one."""
        self._down = True
        await self._thread.run(self._cut())

    async def aclose(self) -> None:
        await asyncio.to_thread(self._thread.stop, 10)

    def hang(self) -> None:
        """Hang: stay connected and send nothing more, not even to watches."""
        self._silent = True

    async def resume(self) -> None:
        self._silent = False
        await self._thread.run(self._wake())

    def silence(self, *resources: str) -> None:
        """Let open watches bring nothing more, as those of a dead connection."""
        wanted = resources or ("leases", "configmaps")
        self._silenced |= {task for task in self._watches if task.get_name() in wanted}

    def expire_pages(self, times: int) -> None:
        """Let so many continued listings find that their version is forgotten."""
        self._expiring_pages = times

    def throttle(self, times: int, seconds: int) -> None:
        """Tell the next so many requests to come again later."""
        self._throttle = [seconds] * times

    def conflict(self, times: int) -> None:
        """Make so many updates find that the object was changed meanwhile."""
        self._conflicts = times

    async def cut_watches(self) -> None:
        """Break the connections of watches."""
        await self._thread.run(self._cut())

    async def forget(self) -> None:
        """Forget the past: break open watches, and let none start before now."""
        self._forgotten = self.version
        await self.cut_watches()

    async def bookmark(self) -> None:
        """Tell the version to all watches, and forget what was before."""
        await self._thread.run(self._bookmark())

    async def empty(self) -> None:
        """Empty the store, as after the loss of its data."""
        self.objects.clear()
        self._log.clear()
        self.version = 1
        self._forgotten = 0

    async def delete(self, resource: str, name: str, namespace: str = "default") -> None:
        await self._thread.run(self._later(lambda: self._remove(resource, namespace, name)))

    async def put(self, resource: str, item: Json, namespace: str = "default") -> Json:
        return await self._thread.run(self._later(lambda: self._store(resource, namespace, item)))

    @property
    def watched(self) -> set[str]:
        """The resources for which watches are open."""
        return {task.get_name() for task in self._watches}

    def asked(self, method: str, resource: str, *, watch: bool | None = None, since: int = 0) -> list[URL]:
        """Return the requests for a resource, from the one with the given number on."""
        found = [URL(path) for how, path in self.requests[since:] if how == method and f"/{resource}" in path]
        return [url for url in found if watch is None or (url.query.get("watch") == "true") is watch]

    def names(self, resource: str, namespace: str = "default") -> list[str]:
        return sorted(self.objects.get((resource, namespace), {}))

    # How it does that.

    async def _later(self, work: Callable[[], T]) -> T:
        return work()

    async def _wake(self) -> None:
        self._tell()

    async def _start(self) -> None:
        if self._runner is not None:
            return
        app = web.Application(client_max_size=MAX_BODY)
        for prefix in ("/api/v1", "/apis/coordination.k8s.io/v1"):
            base = prefix + "/namespaces/{namespace}/{resource}"
            app.router.add_route("*", base, self._handle)
            app.router.add_route("*", base + "/{name}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def _end(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        await self._cut()
        # A connection that is just being accepted is nobody's when the server closes: let it arrive first.
        for _ in range(10):
            await asyncio.sleep(0)
        await runner.cleanup()

    async def _cut(self) -> None:
        # They end by themselves: the library does not like handlers that are cancelled.
        self._cuts += 1
        while self._watches:
            self._tell()
            await asyncio.sleep(0)

    async def _bookmark(self) -> None:
        self.version += 1
        for resource in ("leases", "configmaps"):
            self._note(resource, "", "BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})
        self._tell()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        resource, namespace = request.match_info["resource"], request.match_info["namespace"]
        name = request.match_info.get("name")
        self.requests.append((request.method, request.path_qs))
        if self._down:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        cuts = self._cuts
        while self._silent and cuts == self._cuts:
            await self._changed.wait()
        try:
            if self._throttle:
                seconds = self._throttle.pop(0)
                refusal = Refusal(429, "TooManyRequests", "too many requests, please try again later")
                return web.json_response(refusal.status, status=429, headers={"Retry-After": str(seconds)})
            verb = self._verb(request, name)
            self._authorize(request, verb, resource)
            if resource not in KINDS:
                raise Refusal(404, "NotFound", "the server could not find the requested resource")
            if verb == "watch":
                return await self._watch(request, resource, namespace, cuts)
            body = await request.json() if request.can_read_body else {}
            return web.json_response(self._answer(verb, resource, namespace, name, request.query, body))
        except Refusal as refusal:
            return web.json_response(refusal.status, status=refusal.code)
        except web.HTTPRequestEntityTooLarge:
            large = Refusal(413, "RequestEntityTooLarge", "Request entity too large: limit is 3145728")
            return web.json_response(large.status, status=413)

    def _verb(self, request: web.Request, name: str | None) -> str:
        if request.method == "GET" and name is None:
            return "watch" if request.query.get("watch") == "true" else "list"
        verbs = {"GET": "get", "POST": "create", "PUT": "update", "DELETE": "delete", "PATCH": "patch"}
        return verbs[request.method]

    def _authorize(self, request: web.Request, verb: str, resource: str) -> None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.tokens:
            raise Refusal(401, "Unauthorized", "Unauthorized")
        allowed = self.tokens[token]
        if allowed is not None and (verb, resource) not in allowed:
            raise Refusal(
                403, "Forbidden", f'{resource} is forbidden: User "somebody" cannot {verb} resource "{resource}"'
            )

    def _answer(self, verb: str, resource: str, namespace: str, name: str | None, query: Any, body: Json) -> Json:
        there = self.objects.setdefault((resource, namespace), {})
        dry = query.get("dryRun") == "All"
        if verb == "list":
            return self._list(resource, there, query)
        if verb == "create":
            if namespace not in self.namespaces:
                raise Refusal(404, "NotFound", f'namespaces "{namespace}" not found')
            if body["metadata"]["name"] in there:
                raise Refusal(409, "AlreadyExists", f'{resource} "{body["metadata"]["name"]}" already exists')
            return self._store(resource, namespace, body, dry=dry)
        assert name is not None
        if name not in there:
            raise Refusal(404, "NotFound", f'{resource} "{name}" not found')
        if verb == "get":
            return there[name]
        if verb == "update":
            return self._update(resource, namespace, there[name], body, dry)
        self._check(there[name], body.get("preconditions") or {})
        if not dry:
            self._remove(resource, namespace, name)
        return {"apiVersion": "v1", "kind": "Status", "status": "Success"}

    def _update(self, resource: str, namespace: str, before: Json, body: Json, dry: bool) -> Json:
        version = body["metadata"].get("resourceVersion")
        if resource == "leases" and version is None:
            raise Refusal(
                422, "Invalid", "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update"
            )
        if self._conflicts:
            self._conflicts -= 1
            self._store(resource, namespace, before | {"touched": str(self.version)}, uid=before["metadata"]["uid"])
            before = self.objects[resource, namespace][before["metadata"]["name"]]
        if version is not None:
            self._check(before, {"resourceVersion": version})
        return self._store(resource, namespace, body, uid=before["metadata"]["uid"], dry=dry)

    def _check(self, item: Json, preconditions: Json) -> None:
        for field, wanted in preconditions.items():
            if item["metadata"][field] != wanted:
                raise Refusal(409, "Conflict", "the object has been modified; please apply your changes to the latest")

    def _store(self, resource: str, namespace: str, body: Json, *, uid: str | None = None, dry: bool = False) -> Json:
        api, kind = KINDS[resource]
        item = copy.deepcopy(body) | {"apiVersion": api, "kind": kind}
        self._validate(resource, item)
        there = self.objects.setdefault((resource, namespace), {})
        name = item["metadata"]["name"]
        item["metadata"] |= {"namespace": namespace, "uid": uid or str(uuid.uuid4())}
        before = there.get(name)
        if before is not None:
            item["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
            if item == before:
                return before
        if dry:
            return item
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        there[name] = item
        self._note(resource, namespace, "ADDED" if before is None else "MODIFIED", item)
        self._tell()
        if self._is_orphan(item):
            self._remove(resource, namespace, name)
        return item

    def _validate(self, resource: str, item: Json) -> None:
        metadata = item["metadata"]
        labels = metadata.get("labels", {})
        annotations = sum(len(key) + len(value.encode()) for key, value in metadata.get("annotations", {}).items())
        good = len(metadata["name"]) <= 253 and NAME.fullmatch(metadata["name"]) is not None
        good = good and all(LABEL_KEY.fullmatch(key) and LABEL_VALUE.fullmatch(labels[key]) for key in labels)
        good = good and annotations <= MAX_ANNOTATIONS
        data = sum(len(b64decode(value, validate=True)) for value in item.get("binaryData", {}).values())
        if not good or data > MAX_CONFIG_MAP:
            raise Refusal(422, "Invalid", f'{resource} "{metadata["name"][:80]}" is invalid')

    def _remove(self, resource: str, namespace: str, name: str) -> None:
        item = self.objects.get((resource, namespace), {}).pop(name, None)
        if item is None:
            return
        self.version += 1
        item = copy.deepcopy(item)
        item["metadata"]["resourceVersion"] = str(self.version)
        self._note(resource, namespace, "DELETED", item)
        self._tell()
        for (kind, where), there in list(self.objects.items()):
            for orphan in [key for key, child in there.items() if self._is_orphan(child)]:
                self._remove(kind, where, orphan)

    def _is_orphan(self, item: Json) -> bool:
        owners = item["metadata"].get("ownerReferences", [])
        alive = {other["metadata"]["uid"] for there in self.objects.values() for other in there.values()}
        return bool(owners) and all(owner["uid"] not in alive for owner in owners)

    def _list(self, resource: str, there: dict[str, Json], query: Any) -> Json:
        items = [item for item in there.values() if _matches(item, query.get("labelSelector", ""))]
        items.sort(key=lambda item: str(item["metadata"]["name"]))
        limit = min(int(query.get("limit", 500)), self.page_limit or 500)
        after, at = "", self.version
        if "continue" in query:
            said = json.loads(query["continue"])
            after, at = said["after"], said["at"]
            if self._expiring_pages:
                self._expiring_pages -= 1
                raise Refusal(410, "Expired", "The provided continue parameter is too old")
        items = [item for item in items if item["metadata"]["name"] > after]
        metadata: Json = {"resourceVersion": str(at)}
        if len(items) > limit:
            metadata["continue"] = json.dumps({"after": items[limit - 1]["metadata"]["name"], "at": at})
        api, kind = KINDS[resource]
        plain = [{key: value for key, value in item.items() if key not in ("kind", "apiVersion")} for item in items]
        return {"apiVersion": api, "kind": f"{kind}List", "metadata": metadata, "items": plain[:limit]}

    async def _watch(self, request: web.Request, resource: str, namespace: str, cuts: int) -> web.StreamResponse:
        query = request.query
        at = int(query["resourceVersion"])
        forgotten = Refusal(410, "Expired", f"too old resource version: {at} ({self.version})")
        if at < self._forgotten and self.gone_by_status:
            raise forgotten
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        task.set_name(resource)
        self._watches.add(task)
        try:
            if at < self._forgotten:
                await _send(response, {"type": "ERROR", "object": forgotten.status})
                return response
            async with asyncio.timeout(float(query.get("timeoutSeconds", "1800"))):
                await self._send_changes(request, response, resource, namespace, at, cuts)
        except (TimeoutError, OSError):
            return response
        finally:
            self._watches.discard(task)
        return response

    async def _send_changes(
        self, request: web.Request, response: web.StreamResponse, resource: str, namespace: str, at: int, cuts: int
    ) -> None:
        query = request.query
        while True:
            changed = self._changed
            if cuts != self._cuts:
                # As a server that dies: no last piece, which would be a proper end.
                if request.transport is not None:
                    request.transport.abort()
                return
            for version, kind, where, what, item in list(self._log):
                if version <= at or kind != resource or self._silent or asyncio.current_task() in self._silenced:
                    continue
                if what == "BOOKMARK":
                    if query.get("allowWatchBookmarks") == "true":
                        await _send(response, {"type": what, "object": item})
                elif where == namespace and _matches(item, query.get("labelSelector", "")):
                    await _send(response, {"type": what, "object": item})
                at = version
            await changed.wait()

    def _note(self, resource: str, namespace: str, what: str, item: Json) -> None:
        self._log.append((self.version, resource, namespace, what, item))

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _matches(item: Json, selector: str) -> bool:
    labels = item["metadata"].get("labels", {})
    wanted = [part.partition("=") for part in selector.split(",") if part]
    return all(labels.get(key) == value for key, _, value in wanted)


async def _send(response: web.StreamResponse, event: Json) -> None:
    await response.write(json.dumps(event).encode() + b"\n")
