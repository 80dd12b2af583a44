"""The buckets of all frontends, in Redis or Valkey. The only module that needs the library.

::

    <prefix>:rate:<rule>:<hash>   a hash of one bucket, until it is full and counts nothing
        requests, tokens          its levels
        at                        as of when, in seconds of the server
        n<frontend>               "<count> <until>": the requests under way in a frontend, and until when they count

What a rule tells apart, such as the name of a key, is hashed. One script does everything at once, so that no two
frontends take the last place of a bucket.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from typing import Any

from dynamo_core.errors import CannotConnect
from dynamo_redis import ReusedConnection
from redis.asyncio.connection import Connection
from redis.exceptions import NoScriptError

from dynamo_plugin_admission_rate_limit.rules import CONCURRENCY, REQUESTS, TOKENS, Rate
from dynamo_plugin_admission_rate_limit.shared_config import SharedConfig
from dynamo_plugin_admission_rate_limit.sharing import BucketAnswer, BucketReport, Question, Reply, Store

#: Where the settings stand.
SECTION = "admission.shared"
#: The limits by which the script refuses, as it numbers them.
_LIMITS = (REQUESTS, TOKENS, CONCURRENCY)

#: Arguments: the frontend's field, its ttl, the number of questions. Then for each bucket capacity and rate of
#: requests, and of tokens (-1: no limit), concurrency (-1: no limit), what is owed, and the frontend's requests. Then
#: for each question the prompt, how many buckets it needs, and which. It answers which bucket refuses each question and
#: by which limit (0: none), then the levels.
SCRIPT = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local me, ttl, position = ARGV[1], tonumber(ARGV[2]), 3
local function take()
  position = position + 1
  return tonumber(ARGV[position])
end
local function text(number)
  return string.format('%.17g', number)
end
local function kept(b, unit)
  return b.limits[unit][1] < 0 and '' or text(b.level[unit])
end
local buckets, reply = {}, {}
for i, key in ipairs(KEYS) do
  local b = {
    limits = {requests = {take(), take()}, tokens = {take(), take()}}, most = take(),
    owed = {requests = take(), tokens = take()}, mine = take(), others = 0, gone = {}, level = {}
  }
  local found = redis.pcall('HGETALL', key)
  if found.err then
    redis.call('DEL', key)
    found = {}
  end
  local stored = {}
  for j = 1, #found, 2 do
    stored[found[j]] = found[j + 1]
    if string.sub(found[j], 1, 1) == 'n' and found[j] ~= me then
      local count, till = string.match(found[j + 1], '^(%d+) (%S+)$')
      if count and (tonumber(till) or 0) > now then
        b.others = b.others + count
      else
        b.gone[#b.gone + 1] = found[j]
      end
    end
  end
  local passed = math.max(0, now - (tonumber(stored.at) or now))
  for unit, limit in pairs(b.limits) do
    local level = math.min((tonumber(stored[unit]) or limit[1]) + passed * limit[2], limit[1])
    b.level[unit] = limit[1] < 0 and 0 or math.min(level - b.owed[unit], limit[1])
  end
  buckets[i] = b
end
local function lacks(b, prompt)
  local requests, tokens = b.limits.requests[1], b.limits.tokens[1]
  if b.most >= 0 and b.others + b.mine >= b.most then return 3 end
  if requests >= 0 and b.level.requests < 1 - 1e-6 then return 1 end
  if tokens >= 0 and b.level.tokens < math.min(math.max(prompt, 1), tokens) - 1e-6 then return 2 end
  return 0
end
for _ = 1, tonumber(ARGV[3]) do
  local prompt, needed, refused, why = take(), {}, 0, 0
  for i = 1, take() do
    needed[i] = take()
    if why == 0 then
      why = lacks(buckets[needed[i]], prompt)
      refused = why == 0 and 0 or needed[i]
    end
  end
  if why == 0 then
    for _, i in ipairs(needed) do
      local b = buckets[i]
      b.level.requests, b.level.tokens = b.level.requests - 1, b.level.tokens - prompt
      b.mine = b.mine + 1
    end
  end
  reply[#reply + 1] = refused
  reply[#reply + 1] = why
end
for i, key in ipairs(KEYS) do
  local b, lasts = buckets[i], 0
  local counts = b.most >= 0 and b.mine > 0
  for unit, limit in pairs(b.limits) do
    if limit[1] >= 0 then lasts = math.max(lasts, (limit[1] - b.level[unit]) / limit[2]) end
  end
  reply[#reply + 1] = text(b.level.requests)
  reply[#reply + 1] = text(b.level.tokens)
  if counts or b.others > 0 then lasts = math.max(lasts, ttl) end
  redis.call('HSET', key, 'requests', kept(b, 'requests'), 'tokens', kept(b, 'tokens'), 'at', text(now))
  if counts then
    redis.call('HSET', key, me, b.mine .. ' ' .. text(now + ttl))
  else
    b.gone[#b.gone + 1] = me
  end
  if #b.gone > 0 then redis.call('HDEL', key, unpack(b.gone)) end
  redis.call('PEXPIRE', key, math.ceil(math.min(lasts, 1e9) * 1000) + 1)
end
return reply
"""
_SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()


class _Connection(ReusedConnection):
    async def read_answer(self, connection: Connection) -> Any:
        try:
            return await super().read_answer(connection)
        except NoScriptError:
            return None


class RedisStore(Store):
    """The store over one connection. For one task at a time; deadlines are the caller's.

    Raises:
        ConfigError: a file of `tls` cannot be used.
    """

    def __init__(self, config: SharedConfig) -> None:
        self._connection = _Connection(config, SECTION, database=config.database, connect_timeout=config.timeout)
        self._field = f"n{secrets.token_hex(8)}"
        self._ttl = config.ttl
        self._prefix = f"{config.prefix}:rate:"

    async def exchange(self, reports: Sequence[BucketReport], questions: Sequence[Question]) -> Reply:
        keys = [self._key(report) for report in reports]
        arguments: list[str | int | float] = [self._field, self._ttl, len(questions)]
        for report in reports:
            rule = report.rule
            arguments += (*_rate(rule.requests), *_rate(rule.tokens))
            arguments.append(-1 if rule.concurrency is None else rule.concurrency)
            arguments += (report.owed_requests, report.owed_tokens, report.running)
        for question in questions:
            arguments += (question.prompt, len(question.buckets), *(index + 1 for index in question.buckets))
        (answer,) = await self._connection.ask([("EVALSHA", _SHA, len(keys), *keys, *arguments)])
        if answer is None:
            (answer,) = await self._connection.ask([("EVAL", SCRIPT, len(keys), *keys, *arguments)])
        return _reply(answer, len(reports), len(questions))

    async def aclose(self) -> None:
        await self._connection.aclose()

    def _key(self, report: BucketReport) -> str:
        told = repr((report.rule.by, report.values)).encode("utf-8", "surrogatepass")
        return f"{self._prefix}{report.rule.name}:{hashlib.blake2b(told, digest_size=16).hexdigest()}"


def _rate(rate: Rate | None) -> tuple[float, float]:
    return (-1, 0) if rate is None else (rate.capacity, rate.per_second)


def _reply(answer: Any, reports: int, questions: int) -> Reply:
    """Return what the script has answered.

    Raises:
        CannotConnect: something else has.
    """
    try:
        refusals = [
            None if not why else BucketAnswer(int(bucket) - 1, _LIMITS[int(why) - 1])
            for bucket, why in zip(answer[0 : 2 * questions : 2], answer[1 : 2 * questions : 2], strict=True)
        ]
        values = [float(level) for level in answer[2 * questions :]]
        levels = list(zip(values[::2], values[1::2], strict=True))
        if (len(refusals), len(levels)) != (questions, reports) or not all(map(math.isfinite, values)):
            raise ValueError("it has other figures than were asked for")
    except (TypeError, ValueError, IndexError) as error:
        raise CannotConnect(f"Redis has answered what the script does not: {error}", cause=error) from error
    return Reply(refusals, levels)
