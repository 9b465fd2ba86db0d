-- The live workers of a fleet, grouped for decisions.
--
-- Reading all rows costs as much as all index lookups, and there are thousands of decisions between two heartbeats.
-- So decoded workers and their groups are kept between calls, by key prefix, as long as they equal the data of Redis:
--
--   every heartbeat and every view that a gateway reads, of any release, writes `last_call` and, when a worker joins,
--   changes or leaves, `generation`. After those of another release, and after each change, all rows are read again, and
--   decoded if their bytes have changed
--   rows and reservations that this library writes are kept as they are written
--   reservations of another release are seen when its gateway reads its next view, or at the next heartbeat of the worker
--   a row is decoded again when one of its reservations becomes valid or expires, or its lease ends
--
-- All of it is lost when the library is loaded again: after a failover or a restart.

local MAX_FLEETS = 8
local fleets, fleet_count = {}, 0

local function kept_fleet(prefix)
  local fleet = fleets[prefix]
  if not fleet then
    if fleet_count == MAX_FLEETS then fleets, fleet_count = {}, 0 end
    fleet, fleet_count = {workers = {}, count = 0, models = {}, stamp = false, from = 0, till = 0}, fleet_count + 1
    fleets[prefix] = fleet
  end
  return fleet
end

-- Invalidates the kept fleet: its rows may have changed.
local function doubt_fleet(prefix)
  if fleets[prefix] then fleets[prefix].stamp = false end
end

-- `worker` of a kept fleet was decoded again or has a new load.
local function keep_worker(fleet, worker)
  fleet.from, fleet.till = math.max(fleet.from, worker.from), math.min(fleet.till, worker.till)
end

-- Whether the kept fleet equals the rows of Redis, as far as the mark in `meta` shows.
local function fleet_is_current(state)
  local fleet = fleets[state.prefix]
  return fleet ~= nil and fleet.stamp == meta_stamp(state)
end

-- The mark in `meta` has changed, and the rows have not.
local function stamp_fleet(state)
  fleets[state.prefix].stamp = meta_stamp(state)
end

-- The row of one worker has changed from `before` to `row`. A worker that is new or of another kind, or a row that
-- another release has changed, is seen when all rows are read again.
local function keep_row(prefix, incarnation, before, row, now)
  local fleet = fleets[prefix]
  if not fleet or not fleet.stamp then return end
  local worker = fleet.workers[incarnation]
  if not worker or worker.row ~= before then return doubt_fleet(prefix) end
  local live, kind = worker.live, worker.kind
  read_row(worker, row, now)
  if worker.live ~= live or worker.kind ~= kind then
    fleet.count = -1 -- groups are made again
  elseif worker.live then
    keep_worker(fleet, worker)
  end
end

-- Prefill ends and decode ends of one compat hash: workers of different hashes are never paired. A worker that does
-- both is in both lists.
local function add_to_group(groups, worker)
  local group, role = groups[worker.compat], worker.role
  if not group then
    group = {members = {}, prefills = {}, decodes = {}, shortest = math.huge}
    groups[worker.compat] = group
  end
  group.members[#group.members + 1] = worker
  if role ~= ROLE_DECODE then group.prefills[#group.prefills + 1] = worker end
  if role ~= ROLE_PREFILL then group.decodes[#group.decodes + 1] = worker end
  group.shortest = math.min(group.shortest, worker.context_length)
end

-- All live workers, by model and compat hash.
local function regroup(fleet)
  local models = {}
  for _, worker in pairs(fleet.workers) do
    if worker.live then
      models[worker.model] = models[worker.model] or {}
      add_to_group(models[worker.model], worker)
    end
  end
  fleet.models = models
end

-- Decodes the rows whose meaning has changed with the time. True if a worker changed its kind, joined or left.
local function reread(fleet, now)
  local changed, from, till = false, -math.huge, math.huge
  for _, worker in pairs(fleet.workers) do
    if now < worker.from or now >= worker.till then
      local live, kind = worker.live, worker.kind
      read_row(worker, worker.row, now)
      changed = changed or live ~= worker.live or kind ~= worker.kind
    end
    if worker.live then
      from, till = math.max(from, worker.from), math.min(till, worker.till)
    else
      till = math.min(till, now + RESERVATION_BUCKET_MS)
    end
  end
  fleet.from, fleet.till = from, till
  return changed
end

-- Applies all rows. True if a worker joined or left.
local function take_rows(fleet, prefix, rows)
  local workers, before, changed = {}, fleet.workers, fleet.count * 2 ~= #rows
  for i = 1, #rows, 2 do
    local worker = before[rows[i]]
    if not worker then worker, changed = unread_worker(prefix, rows[i]), true end
    if worker.row ~= rows[i + 1] then worker.row, worker.till = rows[i + 1], -math.huge end
    if worker_of(rows[i]) then workers[rows[i]] = worker end
  end
  fleet.workers, fleet.count = workers, #rows / 2
  return changed
end

-- The current fleet in Redis.
local function current_fleet(state)
  local fleet, now, changed = kept_fleet(state.prefix), state.now, false
  local stamp = meta_stamp(state)
  if fleet.stamp ~= stamp or fleet.count ~= state.count then
    changed = take_rows(fleet, state.prefix, redis.call('HGETALL', state.fleet))
    fleet.stamp, fleet.till = stamp, -math.huge
  end
  if now < fleet.from or now >= fleet.till then changed = reread(fleet, now) or changed end
  if changed then regroup(fleet) end
  return fleet
end

-- Workers of `group` that may take the prompt of the query; nil if there is none.
local function narrowed(group, query)
  local groups = {}
  for _, worker in ipairs(group.members) do
    if worker.context_length > query.prompt_tokens and not query.exclude[worker.incarnation] then
      add_to_group(groups, worker)
    end
  end
  local _, rest = next(groups)
  return rest
end

-- Groups of workers of the model that can hold the prompt. Their matches are not known yet.
local function eligible(fleet, query)
  local found, unrestricted = {}, next(query.exclude) == nil
  for _, group in pairs(fleet.models[query.model] or {}) do
    if unrestricted and group.shortest > query.prompt_tokens then
      -- A copy, because the decision adds fields to it.
      found[#found + 1] = {members = group.members, prefills = group.prefills, decodes = group.decodes}
    else
      found[#found + 1] = narrowed(group, query)
    end
  end
  return found
end
