"""Lua scripts: the only writers of permits, tickets and books. Each runs atomically on the server.

Shared words: a member is `<ticket>.<attempt>`; the zset `permits` is scored by lease expiry (ms, server time),
`published` and `refunded` (waiting to be given out, under the attempt that failed, or 0) by ticket, `kept` (trained,
but not yet in a durable checkpoint) by update. Keys arrive in the order that each script names; they share one hash
tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vla_stream.broker.connection import Client, ResponseError

MAX_ATTEMPTS = 3  # a ticket that failed this often is given up and counted

_PRELUDE = f"""
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
-- Give a removed ticket back, once: its number is handed out again under the next attempt.
local function refund(refunded, books, member)
  local ticket, attempt = string.match(member, '^(%d+)%.(%d+)$')
  if tonumber(attempt) >= {MAX_ATTEMPTS} then
    redis.call('HINCRBY', books, 'given_up', 1)
  else
    redis.call('ZADD', refunded, ticket, member)
  end
end
-- A published segment that will not be trained: counted under `counter`, its ticket given back (but for one that was
-- trained before the server lost it, whose number must not be trained again).
local function unpublish(published, entries, refunded, books, member, counter)
  redis.call('HDEL', entries, member)
  redis.call('ZREM', published, member)
  redis.call('HINCRBY', books, counter, 1)
  if counter ~= 'lost_with_server' then refund(refunded, books, member) end
end
-- A trained segment is done with: acknowledged, deleted, forgotten.
local function release(entries, trajectories, group, member, entry)
  redis.call('XACK', trajectories, group, entry)
  redis.call('XDEL', trajectories, entry)
  redis.call('HDEL', entries, member)
end
-- Permits are leases: those past their time return.
local function expire(permits, refunded, books)
  local gone = redis.call('ZRANGEBYSCORE', permits, '-inf', now_ms())
  for _, member in ipairs(gone) do
    redis.call('ZREM', permits, member)
    redis.call('HINCRBY', books, 'expired', 1)
    refund(refunded, books, member)
  end
end
"""


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its name in error messages, and its source."""

    name: str
    body: str
    frees_memory: bool = False  # runs on a full server too (F23): it removes more than it adds, or a few bytes only

    @property
    def source(self) -> str:
        flags = "#!lua flags=allow-oom\n" if self.frees_memory else ""
        return flags + _PRELUDE + self.body


RENEW = Script(
    "renew",
    """
-- KEYS stream | ARGV group consumer id… ; renews those still owned by the consumer, counts them.
local owned = 0
for i = 3, #ARGV do
  local p = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if #p > 0 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
    owned = owned + 1
  end
end
return owned
""",
    frees_memory=True,
)

HAND_BACK = Script(
    "hand_back",
    """
-- KEYS stream | ARGV group consumer idle_ms entry ; an entry that its consumer cannot serve: others may take it over at
-- once, and its delivery did not count. 0 when it is no longer the consumer's.
local p = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[4], ARGV[4], 1, ARGV[2])
if #p == 0 then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[4], 'IDLE', ARGV[3], 'RETRYCOUNT', p[1][4] - 1, 'JUSTID')
return 1
""",
    frees_memory=True,
)

SWEEP_CONSUMER = Script(
    "sweep_consumer",
    """
-- KEYS stream | ARGV group consumer idle_ms ; deletes the consumer only while it holds nothing and stays idle.
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local c = {}
  for i = 1, #info, 2 do c[info[i]] = info[i + 1] end
  if c['name'] == ARGV[2] and c['pending'] == 0 and c['idle'] > tonumber(ARGV[3]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
    return 1
  end
end
return 0
""",
)

CLAIM_WORKER = Script(
    "claim_worker",
    """
-- KEYS worker | ARGV token ttl_ms field value… ; takes or keeps the name; 0 when another token holds it.
local kind = redis.call('TYPE', KEYS[1])['ok']
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end  -- somebody's SET is no claim
local holder = redis.call('HGET', KEYS[1], 'token')
if holder and holder ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'token', ARGV[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
""",
    frees_memory=True,
)

RELEASE_WORKER = Script(
    "release_worker",
    """
-- KEYS worker | ARGV token
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
""",
)

PUT_CHUNK = Script(
    "put_chunk",
    """
-- KEYS chunk | ARGV bytes lifetime_ms ; a chunk of weights gets through to a full server: its commit frees segments.
return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
""",
    frees_memory=True,
)

ANSWER = Script(
    "answer",
    """
-- KEYS actions requests | ARGV group entry field value… ; a reply and the end of its request, on a full server too:
-- the simulator that waits for it can then finish its segment, and what a segment holds is freed.
redis.call('XADD', KEYS[1], 'NOMKSTREAM', '*', unpack(ARGV, 3))
redis.call('XACK', KEYS[2], ARGV[1], ARGV[2])
return redis.call('XDEL', KEYS[2], ARGV[2])
""",
    frees_memory=True,
)

ADD_EVENT = Script(
    "add_event",
    """
-- KEYS events | ARGV kept field value… ; a sentence for people gets through to a full server.
return redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', unpack(ARGV, 2))
""",
    frees_memory=True,
)

CREATE_RUN = Script(
    "create_run",
    """
-- KEYS flow config books permits published kept entries refunded
-- ARGV config hold_ms n (counter value)×n field value… ; 0 when the run exists.
-- hold_ms: no permits for so long, since simulators may still register segments of the server's last life.
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local n = tonumber(ARGV[3])
redis.call('HSET', KEYS[1], 'hold_until_ms', now_ms() + ARGV[2], unpack(ARGV, 4 + 2 * n))
redis.call('SET', KEYS[2], ARGV[1])
redis.call('DEL', unpack(KEYS, 3))
if n > 0 then redis.call('HSET', KEYS[3], unpack(ARGV, 4, 3 + 2 * n)) end
return 1
""",
)

ADOPT_CONFIG = Script(
    "adopt_config",
    """
-- KEYS flow config | ARGV config field value… ; 0 when there is no such run.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('SET', KEYS[2], ARGV[1])
return 1
""",
)

REGISTER = Script(
    "register",
    """
-- KEYS flow permits published books | ARGV generation lease_ms member… ; returns how many are permits now.
-- Segments in the making when the server lost everything go on: they were counted as lost, or were never counted.
-- Only until permits are given again: whoever comes later would be one too many.
local f = redis.call('HMGET', KEYS[1], 'generation', 'hold_until_ms')
if f[1] ~= ARGV[1] or now_ms() >= tonumber(f[2]) then return 0 end
local count = 0
for i = 3, #ARGV do
  if not redis.call('ZSCORE', KEYS[2], ARGV[i]) and not redis.call('ZSCORE', KEYS[3], ARGV[i]) then
    if tonumber(redis.call('HGET', KEYS[4], 'lost_with_server') or '0') > 0 then
      redis.call('HINCRBY', KEYS[4], 'lost_with_server', -1)
    else
      redis.call('HINCRBY', KEYS[4], 'started', 1)
    end
    redis.call('ZADD', KEYS[2], now_ms() + ARGV[2], ARGV[i])
    count = count + 1
  end
end
return count
""",
)

SET_DESIRED = Script(
    "set_desired",
    """
-- KEYS flow control | ARGV desired by kept ; the value first, so that late joiners see it; 0 when there is no such run.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'desired', ARGV[1])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'desired', ARGV[1], 'by', ARGV[2])
return 1
""",
    frees_memory=True,
)

SET_LANE = Script(
    "set_lane",
    """
-- KEYS flow control | ARGV lane by kept remote_reader ; as set_desired. remote_reader: '' when there is none.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'lane', ARGV[1], 'remote_reader', ARGV[4])
if ARGV[4] == '' then redis.call('HDEL', KEYS[1], 'remote_reader') end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'lane', ARGV[1], 'by', ARGV[2])
return 1
""",
    frees_memory=True,
)

SET_SCALE = Script(
    "set_scale",
    """
-- KEYS flow control | ARGV role count by kept ; as set_desired.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'scale.' .. ARGV[1], ARGV[2])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'scale', ARGV[1], 'count', ARGV[2], 'by', ARGV[3])
return 1
""",
    frees_memory=True,
)

SET_TRACE = Script(
    "set_trace",
    """
-- KEYS flow | ARGV ms ; workers send their spans for so long from now. Never shorter than somebody else asked for.
-- Returns now and when it ends, in ms, or nil when there is no such run.
if redis.call('EXISTS', KEYS[1]) == 0 then return nil end
local now = now_ms()
local ends = math.max(now + ARGV[1], tonumber(redis.call('HGET', KEYS[1], 'trace_until_ms') or '0'))
redis.call('HSET', KEYS[1], 'trace_until_ms', string.format('%.0f', ends))
return {now, ends}
""",
)

ANNOUNCE = Script(
    "announce",
    """
-- KEYS flow | ARGV field value ; the first value stays; returns what stands there, or nil when there is no such run.
if redis.call('EXISTS', KEYS[1]) == 0 then return nil end
redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
return redis.call('HGET', KEYS[1], ARGV[1])
""",
    frees_memory=True,
)

GRANT = Script(
    "grant",
    """
-- KEYS flow permits published kept refunded books | ARGV wanted lease_ms all_or_none task turn…
-- Admission: outstanding = |permits| + |published| + |kept| stays below (1 + eta)·B. Returns a reason, or
-- {member, min_version, lane, remote_reader}… : a segment keeps the lane of the moment in which it was permitted.
-- Ticket n belongs to the task that turn n names, the turns going round; only those of the caller's task are given.
-- Numbers of others that are passed over on the way wait in `refunded`, as attempt 0, and count against the limit like
-- what is outstanding: no task takes the room of another, however quick it is. Nor does any have more tickets waiting
-- or outstanding than its part of (1 + eta)·B, so that the others cannot leave it far behind.
local f = redis.call('HMGET', KEYS[1], 'desired', 'segments_per_update', 'max_staleness', 'version', 'first_version',
                     'hold_until_ms', 'lane', 'remote_reader', 'next_ticket')
if not f[1] then return 'missing' end
expire(KEYS[2], KEYS[5], KEYS[6])
if f[1] ~= 'running' then return f[1] end
if now_ms() < tonumber(f[6]) then return 'holding' end
if tonumber(f[4]) == 0 then return 'no weights' end
local B, eta = tonumber(f[2]), tonumber(f[3])
local limit, kept = (1 + eta) * B, redis.call('ZCARD', KEYS[4])
local making = redis.call('ZCARD', KEYS[2])
local outstanding = making + redis.call('ZCARD', KEYS[3]) + kept
local most = math.min(limit - outstanding, tonumber(ARGV[1]))
local least = ARGV[3] == '1' and tonumber(ARGV[1]) or 1
if most < least then return 'full' end
local turns = #ARGV - 4
local function task_of(ticket) return ARGV[5 + (ticket - 1) % turns] end
local function ticket_of(member) return tonumber(string.match(member, '^%d+')) end
-- What waits to be given out comes first, then numbers that are new.
local waiting, members, passed = redis.call('ZRANGE', KEYS[5], 0, -1), {}, {}
for _, member in ipairs(waiting) do
  if #members < most and task_of(ticket_of(member)) == ARGV[4] then
    members[#members + 1] = {ticket_of(member), member}
  end
end
local under_way, part = {}, {}
if turns > 1 then
  for i = 5, #ARGV do under_way[ARGV[i]], part[ARGV[i]] = 0, (part[ARGV[i]] or 0) + 1 end
  for _, found in ipairs({waiting, redis.call('ZRANGE', KEYS[2], 0, -1), redis.call('ZRANGE', KEYS[3], 0, -1)}) do
    for _, member in ipairs(found) do
      local task = task_of(ticket_of(member))
      under_way[task] = under_way[task] + 1
    end
  end
end
local total, number = outstanding + #waiting, tonumber(f[9])
-- Where all is published, and less than an update takes, there must be more for it to begin.
local needed = making + #waiting == 0 and B + kept or 0
while #members < most and total < limit do
  local task = task_of(number + 1)
  if turns > 1 then
    if total >= needed and under_way[task] >= math.ceil(part[task] * limit / turns) then break end
    under_way[task] = under_way[task] + 1
  end
  total, number = total + 1, number + 1
  if task == ARGV[4] then members[#members + 1] = {number} else passed[#passed + 1] = number end
end
if #members < least then return 'no turn' end
-- The first write is one that a full server refuses: nothing new begins there (F23).
redis.call('HINCRBY', KEYS[6], 'started', #members)
-- Those that were passed over at the end would be reserved for nothing.
local last = math.max(tonumber(f[9]), members[#members][1])
redis.call('HINCRBY', KEYS[1], 'next_ticket', last - tonumber(f[9]))
for _, ticket in ipairs(passed) do
  if ticket < last then redis.call('ZADD', KEYS[5], ticket, ticket .. '.0') end
end
local out = {}
for _, item in ipairs(members) do
  local ticket, old = item[1], item[2]
  local member = ticket .. '.' .. (old and string.match(old, '%.(%d+)$') + 1 or 1)
  if old then redis.call('ZREM', KEYS[5], old) end
  -- How many segments are trained before this one, in ticket order.
  local before = outstanding + #redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', '(' .. ticket)
  local min_version = math.min(tonumber(f[4]), tonumber(f[4]) + math.floor(before / B) - eta)
  if min_version < tonumber(f[5]) then min_version = tonumber(f[5]) end
  redis.call('ZADD', KEYS[2], now_ms() + tonumber(ARGV[2]), member)
  out[#out + 1] = {member, tostring(min_version), f[7] or 'auto', f[8] or ''}
  outstanding = outstanding + 1
end
return out
""",
)

RENEW_PERMITS = Script(
    "renew_permits",
    """
-- KEYS permits | ARGV lease_ms member… ; returns the members that are no longer permits.
local gone, now = {}, now_ms()
for i = 2, #ARGV do
  local expiry = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if expiry and tonumber(expiry) > now then
    redis.call('ZADD', KEYS[1], now + tonumber(ARGV[1]), ARGV[i])
  else
    gone[#gone + 1] = ARGV[i]
  end
end
return gone
""",
    frees_memory=True,
)

PUBLISH = Script(
    "publish",
    """
-- KEYS permits published entries trajectories | ARGV member field value… ; the entry is added exactly once per member.
if redis.call('ZSCORE', KEYS[2], ARGV[1]) then return 'repeat' end
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 'expired' end
redis.call('HSET', KEYS[3], ARGV[1], redis.call('XADD', KEYS[4], '*', unpack(ARGV, 2)))
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], string.match(ARGV[1], '^%d+'), ARGV[1])
return 'added'
""",
    frees_memory=True,  # by its update: what a full server would otherwise wait for
)

ABORT = Script(
    "abort",
    """
-- KEYS permits refunded books | ARGV member… ; segments given up by their own simulator.
local count = 0
for i = 1, #ARGV do
  if redis.call('ZREM', KEYS[1], ARGV[i]) == 1 then
    redis.call('HINCRBY', KEYS[3], 'aborted', 1)
    refund(KEYS[2], KEYS[3], ARGV[i])
    count = count + 1
  end
end
return count
""",
    frees_memory=True,
)

REFUSE = Script(
    "refuse",
    """
-- KEYS flow published entries refunded books trajectories | ARGV epoch group counter entry…
-- Entries that will not be trained; returns those that were published segments. Whose they are stands in `entries`, not
-- in their own fields, which may be anybody's.
local f = redis.call('HMGET', KEYS[1], 'epoch', 'generation', 'taken_over')
if not f[3] or f[2] ~= f[3] then return 'missing' end
if f[1] ~= ARGV[1] then return 'fenced' end
redis.call('XACK', KEYS[6], ARGV[2], unpack(ARGV, 4))
redis.call('XDEL', KEYS[6], unpack(ARGV, 4))
local all, member_of, refused = redis.call('HGETALL', KEYS[3]), {}, {}
for i = 1, #all, 2 do member_of[all[i + 1]] = all[i] end
for i = 4, #ARGV do
  if member_of[ARGV[i]] then
    unpublish(KEYS[2], KEYS[3], KEYS[4], KEYS[5], member_of[ARGV[i]], ARGV[3])
    refused[#refused + 1] = ARGV[i]
  end
end
return refused
""",
    frees_memory=True,
)

MISS = Script(
    "miss",
    """
-- KEYS flow published entries refunded books trajectories | ARGV epoch taken…
-- Published segments whose entry somebody removed from the stream (F17, F21): counted as poisoned, given out again.
-- Those that the trainer has taken are in its memory, and will be trained.
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return {} end
local taken = {}
for i = 2, #ARGV do taken[ARGV[i]] = true end
local all, missing = redis.call('HGETALL', KEYS[3]), {}
for i = 1, #all, 2 do
  local waits = not taken[all[i]] and redis.call('ZSCORE', KEYS[2], all[i])
  if waits and #redis.call('XRANGE', KEYS[6], all[i + 1], all[i + 1]) == 0 then
    unpublish(KEYS[2], KEYS[3], KEYS[4], KEYS[5], all[i], 'poisoned')
    missing[#missing + 1] = all[i]
  end
end
return missing
""",
    frees_memory=True,
)

COMMIT = Script(
    "commit",
    """
-- KEYS flow published kept entries books trajectories weights
-- ARGV epoch expected_update version counter group weights_kept keep n (entry member)×n field value…
-- One update: weights entry, new update and version, segments un-published, and released unless `keep` is 1.
-- missing: this life of the server knows of no trainer yet; the caller has to take the run over anew.
local f = redis.call('HMGET', KEYS[1], 'epoch', 'update', 'version', 'generation', 'taken_over')
if not f[5] or f[4] ~= f[5] then return 'missing' end
if f[1] ~= ARGV[1] then return 'fenced' end
if tonumber(f[2]) == ARGV[2] + 1 and f[3] == ARGV[3] then return 'repeat' end
if f[2] ~= ARGV[2] then return 'fenced' end
redis.call('XRANGE', KEYS[6], '0-0', '0-0')  -- a stranger's key fails here, before half of the commit is made
redis.call('XADD', KEYS[7], 'MAXLEN', ARGV[6], '*', unpack(ARGV, 9 + 2 * ARGV[8]))
redis.call('HSET', KEYS[1], 'update', ARGV[2] + 1, 'version', ARGV[3])
for i = 9, 8 + 2 * ARGV[8], 2 do
  local entry, member = ARGV[i], ARGV[i + 1]
  local count = redis.call('ZREM', KEYS[2], member)
  redis.call('HINCRBY', KEYS[5], ARGV[4], count)
  if ARGV[7] == '1' and count == 1 then
    redis.call('ZADD', KEYS[3], ARGV[2] + 1, member)
  else
    release(KEYS[4], KEYS[6], ARGV[5], member, entry)
  end
end
return 'committed'
""",
    frees_memory=True,
)

RELEASE = Script(
    "release",
    """
-- KEYS flow kept entries trajectories | ARGV epoch group update ; returns how many segments were released.
-- The checkpoint of `update` is durable: what was trained up to it is not needed again.
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
local done = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[3])
for _, member in ipairs(done) do
  release(KEYS[3], KEYS[4], ARGV[2], member, redis.call('HGET', KEYS[3], member) or '0-0')
  redis.call('ZREM', KEYS[2], member)
end
return #done
""",
    frees_memory=True,
)

RESUME = Script(
    "resume",
    """
-- KEYS flow published kept entries books trajectories weights
-- ARGV expected_epoch update version weights_kept group trained skipped last_ticket field value…
-- A trainer starts: its epoch fences off older ones. What the lost lineage had trained is given back where it was kept
-- (published again, for this trainer), else it is rolled back. A server that never saw this lineage would give out its
-- tickets once more: it goes on after the last of them.
local f = redis.call('HMGET', KEYS[1], 'epoch', 'generation', 'next_ticket')
if not f[1] then return 'missing' end
if f[1] ~= ARGV[1] then return 'fenced' end
redis.call('XADD', KEYS[7], 'MAXLEN', ARGV[4], '*', unpack(ARGV, 9))
local kept, back = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES'), 0
for i = 1, #kept, 2 do
  if tonumber(kept[i + 1]) > tonumber(ARGV[2]) then
    redis.call('ZADD', KEYS[2], string.match(kept[i], '^%d+'), kept[i])
    back = back + 1
  else
    release(KEYS[4], KEYS[6], ARGV[5], kept[i], redis.call('HGET', KEYS[4], kept[i]) or '0-0')
  end
end
redis.call('DEL', KEYS[3])
local lost = 0
for i, counter in ipairs({'trained', 'skipped'}) do
  local beyond = (tonumber(redis.call('HGET', KEYS[5], counter)) or 0) - tonumber(ARGV[5 + i])
  -- Negative: this server's books are younger than the checkpoint, and nothing of theirs is lost.
  if beyond > 0 then
    redis.call('HINCRBY', KEYS[5], counter, -beyond)
    lost = lost + beyond
  end
end
redis.call('HINCRBY', KEYS[5], lost >= back and 'rolled_back' or 'trained', lost - back)
redis.call('HSET', KEYS[1], 'epoch', f[1] + 1, 'update', ARGV[2], 'version', ARGV[3], 'first_version', ARGV[3],
           'taken_over', f[2])
if (tonumber(f[3]) or 0) < tonumber(ARGV[8]) then redis.call('HSET', KEYS[1], 'next_ticket', ARGV[8]) end
return 'resumed'
""",
    frees_memory=True,
)

READY_IN_ORDER = Script(
    "ready_in_order",
    """
-- KEYS permits published refunded books | ARGV count
-- The lowest published members, up to the lowest ticket that is still running or waits to be given out again.
expire(KEYS[1], KEYS[3], KEYS[4])
local bound = tonumber(redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')[2]) or math.huge
for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  bound = math.min(bound, tonumber(string.match(member, '^%d+')))
end
return redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. bound, 'LIMIT', 0, ARGV[1])
""",
    frees_memory=True,
)


class Scripts:
    """Runs scripts by their SHA, and loads one again when the server forgot it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._shas: dict[str, str] = {}

    def call(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """The script's answer. Errors of the server and the connection go to the caller."""
        sha = self._shas.get(script.name)
        if sha is None:
            sha = self._load(script)
        try:
            return self.client.evalsha(sha, len(keys), *keys, *arguments)
        except ResponseError as exc:
            if not str(exc).startswith("NOSCRIPT") and "NoScript" not in type(exc).__name__:
                raise
            return self.client.evalsha(self._load(script), len(keys), *keys, *arguments)

    def _load(self, script: Script) -> str:
        loaded = self.client.script_load(script.source)
        self._shas[script.name] = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        return self._shas[script.name]
