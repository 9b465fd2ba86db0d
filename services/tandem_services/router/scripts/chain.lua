-- How much of a chain of blocks workers hold. `chain` names some of a prompt's blocks, in order, the last one among them.
--
-- A worker that has a block has all blocks before it, so one look tells on which side of it the match ends. Where a
-- set is wrong the answer is a wrong hint, never more. Of a worker, `low` of the named blocks are known to be there and
-- more than `high` are known not to be.

-- Digests by position, cut from the chain of the decision `cut_for` when they are first looked at. Made once for all
-- decisions: tables that grow cost more than what is put into them.
local cut, cut_for, decisions = {}, {}, 0
for position = 1, MAX_NAMED_BLOCKS do
  cut[position], cut_for[position] = '', 0
end

local WRONG_HINTS = 2 -- in a row, after which the end of the last match is no hint for the next one

-- Four functions:
--   digest(position)         of one named block
--   look(worker, position)   looks at one named block, which is not known of yet
--   search(worker, least)    until the worker is known to have no more than `least`, or exactly what it has
--   on_device(worker)        how much of its match, which is known, is on the device
local function chain_search(state, chain)
  decisions = decisions + 1
  local pcall, sub, decision = redis.pcall, string.sub, decisions
  local last, wrong = 0, 0 -- where a match before has ended: workers mostly share the same prefix

  local function digest(position)
    if cut_for[position] ~= decision then
      cut[position] = sub(chain, position * DIGEST_BYTES - DIGEST_BYTES + 1, position * DIGEST_BYTES)
      cut_for[position] = decision
    end
    return cut[position]
  end

  local function look(worker, position)
    local held = pcall('SISMEMBER', worker.blocks, digest(position))
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
    local key, low, high, hinted = worker.blocks, worker.low, worker.high, wrong < WRONG_HINTS
    while low < high and high > least do
      local position
      if hinted and last >= low and last <= high then
        position = last > low and last or low + 1
      else
        position = (low + high + 1) / 2
        position = position - position % 1
      end
      local held = pcall('SISMEMBER', key, cut_for[position] == decision and cut[position] or digest(position))
      if held == 1 then
        low = position
      elseif held == 0 then
        high = position - 1
      else -- not a set
        state.dropped = state.dropped + drop_unless(key, 'set')
        low, high = 0, 0
      end
    end
    if low == last then
      wrong = 0
    elseif low == high and low > 0 then
      if last > 0 and wrong < WRONG_HINTS then wrong = wrong + 1 end
      if last == 0 or wrong == WRONG_HINTS then last = low end
    end
    worker.low, worker.high = low, high
  end

  -- How many named blocks of its match come before those that are in host memory alone. What the device drops first of
  -- a path is its end, so the device has the beginning of a match.
  local function on_device(worker)
    local first, last, key = 1, worker.low, worker.host_blocks
    if last == 0 or pcall('SISMEMBER', key, digest(last)) ~= 1 then return last end
    while first < last do
      local position = math.floor((first + last) / 2)
      if pcall('SISMEMBER', key, digest(position)) == 1 then
        last = position
      else
        first = position + 1
      end
    end
    return first - 1
  end
  return digest, look, search, on_device
end
