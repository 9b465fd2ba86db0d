-- The prefix index: one set of block digests per incarnation, and the revision it stands at.
-- An update names the revision it builds on. Any other state of the index is a gap: Redis was wiped, the
-- set was dropped as rubbish, or an update was lost; the worker then publishes its whole cache again.

local SLICE = 1000 -- arguments of one command; Lua's C stack holds 8000

-- The revision of an index, -1 when there is none or it is not what we wrote. An index always holds one entry
-- that is no digest, so that a set that was evicted or dropped is not taken for an empty one.
local HOLDER = ''

local function cursor_of(blocks, cursor)
  drop_unless(blocks, 'set')
  drop_unless(cursor, 'string')
  if redis.call('EXISTS', blocks) == 0 then return -1 end
  return tonumber(redis.call('GET', cursor) or '') or -1
end

local function each_slice(digests, command, key)
  local slice = {}
  for first = 1, #digests, DIGEST_BYTES do
    slice[#slice + 1] = string.sub(digests, first, first + DIGEST_BYTES - 1)
    if #slice == SLICE then
      redis.call(command, key, unpack(slice))
      slice = {}
    end
  end
  if #slice > 0 then redis.call(command, key, unpack(slice)) end
end

-- apply_kv_events: add and remove blocks of one incarnation, in order.
-- KEYS: 1 blocks:<incarnation>, 2 cursor:<incarnation>
-- ARGV: 1 revision this update builds on, 2 revision it leads to, 3… events: a kind and its digests,
--       'S' stored, 'R' removed, 'C' everything cleared (only as the first, and then argument 1 is not checked)
-- Returns 'applied', 'repeated' (this very update had been applied: the reply got lost) or 'gap'.
local function apply_kv_events(keys, args)
  local blocks, cursor = keys[1], keys[2]
  local revision = cursor_of(blocks, cursor)
  if revision == tonumber(args[2]) then return 'repeated' end
  if args[3] ~= 'C' and revision ~= tonumber(args[1]) then return 'gap' end
  for i = 3, #args do
    local kind = string.sub(args[i], 1, 1)
    if kind == 'C' then
      redis.call('UNLINK', blocks)
      redis.call('SADD', blocks, HOLDER)
    elseif kind == 'S' then each_slice(string.sub(args[i], 2), 'SADD', blocks)
    else each_slice(string.sub(args[i], 2), 'SREM', blocks) end
  end
  redis.call('SET', cursor, args[2], 'PX', INDEX_TTL_MS)
  redis.call('PEXPIRE', blocks, INDEX_TTL_MS)
  return 'applied'
end

-- How much of a chain sets of digests hold. `chain` names some of a prompt's blocks, in order, the last one among them.
-- A worker that has a block has all blocks before it, so one look tells on which side of it the match ends. Where a
-- set is wrong the answer is a wrong hint, never more.
--
-- Of a worker, `low` of the named blocks are known to be there and more than `high` are known not to be. The function
-- returned looks at `position` and then at others, until the worker is known to have no more than `least`, or exactly
-- what it has.
local function chain_search(state, chain)
  local pcall, sub, floor = redis.pcall, string.sub, math.floor
  -- Cut from the chain when they are first looked at, for all sets.
  local digests = setmetatable({}, {__index = function(cut, position)
    local digest = sub(chain, position * DIGEST_BYTES - DIGEST_BYTES + 1, position * DIGEST_BYTES)
    cut[position] = digest
    return digest
  end})
  local last = 0 -- where the match before has ended: workers mostly share the same prefix

  return function(worker, least, position)
    local key, low, high = worker.blocks, worker.low, worker.high
    while low < high do
      local held = pcall('SISMEMBER', key, digests[position])
      if held == 1 then
        low = position
      elseif held == 0 then
        high = position - 1
        if high <= least then break end
      else -- not a set
        state.dropped = state.dropped + drop_unless(key, 'set')
        low, high = 0, 0
      end
      if last > low and last <= high then
        position = last
      elseif last == low then
        position = low + 1
      else
        position = floor((low + high + 1) / 2)
      end
    end
    if low == high and low > 0 then last = low end
    worker.low, worker.high = low, high
  end
end

register('apply_kv_events', apply_kv_events)
