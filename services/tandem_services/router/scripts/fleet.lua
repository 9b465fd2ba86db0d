-- Decoded rows, kept between calls by key prefix and incarnation.
--
-- A decision reads the rows of its candidates. Decoding costs more than reading, and there are thousands of decisions
-- between two heartbeats, so a row is decoded again only where
--
--   its bytes are not those that were decoded: a heartbeat, a reservation, of any release
--   one of its reservations becomes valid or expires, or its lease ends
--
-- Nothing is concluded from a kept row without reading the row, so what is lost with the library, after a failover or a
-- restart, is time.

local MAX_FLEETS = 8
local MAX_KEPT = 2 * MAX_WORKERS -- decoded rows of a fleet, live or not
local fleets, fleet_count = {}, 0

-- `workers` by incarnation; `names`: incarnations by tag (holders.lua); `ranks`: keys by kind (ranks.lua).
local function kept_fleet(prefix)
  local fleet = fleets[prefix]
  if not fleet then
    if fleet_count == MAX_FLEETS then fleets, fleet_count = {}, 0 end
    fleet = {workers = {}, count = 0, names = {}, names_count = 0, ranks = {}, ranks_count = 0}
    fleets[prefix], fleet_count = fleet, fleet_count + 1
  end
  return fleet
end

local NO_WORKER = {live = false} -- of a row under a name that is no incarnation

-- The worker whose row is `row`, decoded now.
local function decoded(state, incarnation, row)
  local fleet, now = kept_fleet(state.prefix), state.now
  local worker = fleet.workers[incarnation]
  if not worker then
    if not worker_of(incarnation) then return NO_WORKER end
    if fleet.count >= MAX_KEPT then fleet.workers, fleet.count = {}, 0 end
    worker = unread_worker(state.prefix, incarnation)
    fleet.workers[incarnation], fleet.count = worker, fleet.count + 1
  end
  if worker.row ~= row or now < worker.from or now >= worker.till then read_row(worker, row, now) end
  return worker
end

-- `incarnation` has no row any more.
local function drop_kept(state, incarnation)
  local fleet = kept_fleet(state.prefix)
  if fleet.workers[incarnation] then
    fleet.workers[incarnation], fleet.count = nil, fleet.count - 1
  end
end

-- Prefill ends and decode ends of one compat hash: workers of different hashes are never paired. A worker that does
-- both is in both lists.
local function add_to_group(groups, worker)
  local group, role = groups[worker.compat], worker.role
  if not group then
    group = {members = {}, prefills = {}, decodes = {}}
    groups[worker.compat] = group
  end
  group.members[#group.members + 1] = worker
  if role ~= ROLE_DECODE then group.prefills[#group.prefills + 1] = worker end
  if role ~= ROLE_PREFILL then group.decodes[#group.decodes + 1] = worker end
end
