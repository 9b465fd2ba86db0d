-- The live workers of a fleet, grouped as decisions need them.
--
-- Most rows are the same in the next decision, and to compare one takes a small part of what decoding it does. So
-- decoded workers and their groups are kept, by key prefix, and a row is decoded again when its bytes or the time has
-- changed: what is kept is never older than Redis, whatever happens to Redis, and the library forgets it when it is
-- loaded again. Groups are made again when somebody comes, goes or becomes another.

local MAX_FLEETS = 8
local fleets, fleet_count = {}, 0

local function kept_fleet(prefix)
  local fleet = fleets[prefix]
  if not fleet then
    if fleet_count == MAX_FLEETS then fleets, fleet_count = {}, 0 end
    fleet, fleet_count = {workers = {}, fields = 0, models = {}}, fleet_count + 1
    fleets[prefix] = fleet
  end
  return fleet
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

-- By model and compat hash, everybody of `rows` who is live. Nobody else is kept.
local function regroup(fleet, rows)
  local workers, models = {}, {}
  for i = 1, #rows, 2 do
    local worker = fleet.workers[rows[i]]
    workers[rows[i]] = worker
    if worker.live then
      models[worker.model] = models[worker.model] or {}
      add_to_group(models[worker.model], worker)
    end
  end
  fleet.workers, fleet.models, fleet.fields = workers, models, #rows
end

-- The fleet as Redis has it now.
local function current_fleet(state)
  local rows = redis.call('HGETALL', state.fleet)
  local prefix, now, fleet = state.prefix, state.now, kept_fleet(state.prefix)
  local workers, changed = fleet.workers, fleet.fields ~= #rows
  for i = 1, #rows, 2 do
    local worker, row = workers[rows[i]], rows[i + 1]
    if not worker then
      worker, changed = unread_worker(prefix, rows[i]), true
      workers[rows[i]] = worker
    end
    if worker.row ~= row or now < worker.from or now >= worker.till then
      local live, kind = worker.live, worker.kind
      read_row(worker, row, now)
      changed = changed or live ~= worker.live or kind ~= worker.kind
    end
  end
  if changed then regroup(fleet, rows) end
  return fleet
end

-- Those of `group` that may take the query's prompt; nil when there is nobody.
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

-- Groups of workers of the model that can hold the prompt. What they have of it is not known yet.
local function eligible(fleet, query)
  local found, anybody = {}, next(query.exclude) == nil
  for _, group in pairs(fleet.models[query.model] or {}) do
    if anybody and group.shortest > query.prompt_tokens then
      -- What a decision finds out about the group is kept beside it.
      found[#found + 1] = {members = group.members, prefills = group.prefills, decodes = group.decodes}
    else
      found[#found + 1] = narrowed(group, query)
    end
  end
  return found
end
