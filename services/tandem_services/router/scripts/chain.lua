-- How much of a chain of blocks workers hold. `chain` names some of a prompt's blocks, in order, the last one among them.
--
-- A worker that has a block has all blocks before it, so one look tells on which side of it the match ends. Where a
-- set is wrong the answer is a wrong hint, never more. Of a worker, `low` of the named blocks are known to be there and
-- more than `high` are known not to be.

-- Digests by position, cut from the chain when they are first looked at, for all sets.
local function digests_of(chain)
  local sub = string.sub
  return setmetatable({}, {__index = function(cut, position)
    local digest = sub(chain, position * DIGEST_BYTES - DIGEST_BYTES + 1, position * DIGEST_BYTES)
    cut[position] = digest
    return digest
  end})
end

-- Digests by position, and three functions on workers:
--   look(worker, position)   looks at one named block, which is not known of yet
--   search(worker, least)    until the worker is known to have no more than `least`, or exactly what it has
--   on_device(worker)        how much of its match, which is known, is on the device
local function chain_search(state, chain)
  local pcall, floor, digests = redis.pcall, math.floor, digests_of(chain)
  local last = 0 -- where the match before has ended: workers mostly share the same prefix

  local function look(worker, position)
    local held = pcall('SISMEMBER', worker.blocks, digests[position])
    if held == 0 then
      worker.high = position - 1
    elseif held == 1 then
      worker.low = position
    else -- not a set
      state.dropped = state.dropped + drop_unless(worker.blocks, 'set')
      worker.low, worker.high = 0, 0
    end
  end

  local function search(worker, least)
    local key, low, high = worker.blocks, worker.low, worker.high
    while low < high and high > least do
      local position
      if last > low and last <= high then
        position = last
      elseif last == low then
        position = low + 1
      else
        position = floor((low + high + 1) / 2)
      end
      local held = pcall('SISMEMBER', key, digests[position])
      if held == 1 then
        low = position
      elseif held == 0 then
        high = position - 1
      else -- not a set
        state.dropped = state.dropped + drop_unless(key, 'set')
        low, high = 0, 0
      end
    end
    if low == high and low > 0 then last = low end
    worker.low, worker.high = low, high
  end

  -- How many named blocks of its match come before those that are in host memory alone. What the device drops first of
  -- a path is its end, so the device has the beginning of a match.
  local function on_device(worker)
    local first, last, key = 1, worker.low, worker.host_blocks
    if last == 0 or pcall('SISMEMBER', key, digests[last]) ~= 1 then return last end
    while first < last do
      local position = floor((first + last) / 2)
      if pcall('SISMEMBER', key, digests[position]) == 1 then
        last = position
      else
        first = position + 1
      end
    end
    return first - 1
  end
  return digests, look, search, on_device
end
