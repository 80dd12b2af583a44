"""Lua scripts that the server runs atomically, and their keys.

::

    <prefix>:epoch       a random word: a store that was emptied has another one
    <prefix>:revision    counts the changes
    <prefix>:leases      a sorted set: lease id, and the revision of its last change
    <prefix>:lease:<id>  a hash that expires with the lease: key -> "<revision>:<value>", and the empty field: its ttl
                         in milliseconds. Lease 0 never expires and holds the values that outlive their writer.

Every change is announced on a channel; what is announced is only that there is something to look at. A lease that ends
by itself stays for its ttl without records, so that one that is missing always has expired or was forgotten.
Every script gets the names of epoch, revision, leases, and one lease, and as first arguments the channel and the id.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The lease of values that outlive their writer.
NO_LEASE = 0

_CHANGED = """
local function changed()
  local revision = redis.call('INCR', KEYS[2])
  redis.call('ZADD', KEYS[3], revision, ARGV[2])
  redis.call('PUBLISH', ARGV[1], revision)
  return revision
end
"""

#: ttl in milliseconds (0: for ever), then key and value in turn, the oldest first. Replaces what the lease held.
REGISTER = (
    _CHANGED
    + """
redis.call('DEL', KEYS[4])
redis.call('HSET', KEYS[4], '', ARGV[3])
for i = 4, #ARGV, 2 do
  redis.call('HSET', KEYS[4], ARGV[i], string.format('%.0f:', redis.call('INCR', KEYS[2])) .. ARGV[i + 1])
end
redis.call('PEXPIRE', KEYS[4], ARGV[3])
return changed()
"""
)

#: Key, value. Answers 0 if there is no such lease.
PUT = (
    _CHANGED
    + """
if ARGV[2] == '0' then
  redis.call('HSETNX', KEYS[4], '', '0')
elseif redis.call('EXISTS', KEYS[4]) == 0 then
  return 0
end
local revision = changed()
redis.call('HSET', KEYS[4], ARGV[3], string.format('%.0f:', revision) .. ARGV[4])
return revision
"""
)

#: Key. A record that is not there is fine.
REMOVE = (
    _CHANGED
    + """
if redis.call('HDEL', KEYS[4], ARGV[3]) == 1 then
  return changed()
end
return 0
"""
)

#: ttl in milliseconds, the number of records. Answers 0 if the lease, or one of its records, is not there.
BEAT = """
if redis.call('HLEN', KEYS[4]) ~= tonumber(ARGV[4]) + 1 or not redis.call('ZSCORE', KEYS[3], ARGV[2]) then
  return 0
end
redis.call('PEXPIRE', KEYS[4], ARGV[3])
return 1
"""

#: ttl in milliseconds. Leaves a lease without records behind, until it expires.
CLOSE = (
    _CHANGED
    + """
if redis.call('DEL', KEYS[4]) == 0 then
  return 0
end
redis.call('HSET', KEYS[4], '', ARGV[3])
redis.call('PEXPIRE', KEYS[4], ARGV[3])
return changed()
"""
)

#: Here the id is what all keys of leases begin with. The epoch and revision that are known, and the epoch to set if
#: there is none. Answers epoch, revision, the ids of all leases, and those that changed with all that they hold.
READ = """
local epoch = redis.call('GET', KEYS[1])
if not epoch then
  epoch = ARGV[5]
  redis.call('SET', KEYS[1], epoch)
end
local revision = tonumber(redis.call('GET', KEYS[2]) or '0')
local known = tonumber(ARGV[4])
if epoch ~= ARGV[3] or revision < known then
  known = -1
end
local there, changed = {}, {}
local leases = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
for i = 1, #leases, 2 do
  local held = {}
  local key = ARGV[2] .. leases[i]
  if tonumber(leases[i + 1]) > known then
    held = redis.pcall('HGETALL', key)
    if #held > 0 then
      changed[#changed + 1] = {leases[i], held}
    end
  elseif redis.call('EXISTS', key) == 1 then
    held = {''}
  end
  if #held == 0 then
    redis.call('ZREM', KEYS[3], leases[i])
  else
    there[#there + 1] = leases[i]
  end
end
return {epoch, revision, there, changed}
"""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of keys under a prefix, and of the channel, which all databases of a server share."""

    prefix: str
    database: int

    @property
    def channel(self) -> str:
        """The channel on which changes are announced."""
        return f"{self.prefix}:changed:{self.database}"

    @property
    def leases(self) -> str:
        """The prefix of the keys of all leases."""
        return f"{self.prefix}:lease:"

    @property
    def shared(self) -> list[str]:
        """The keys that all scripts work on."""
        return [f"{self.prefix}:{name}" for name in ("epoch", "revision", "leases")]

    def keys(self, lease: int) -> list[str]:
        """Return the keys of a script about one lease."""
        return [*self.shared, self.leases + lease_name(lease)]


def lease_name(lease: int) -> str:
    """Return a lease's id as it is written in the store."""
    return f"{lease:x}"
