-- Length of the match of a chain of blocks on each worker. `chain` names some blocks of a prompt, in order, always the
-- last one.
--
-- A worker that has a block has all blocks before it, so one lookup shows on which side of the block the match ends. If
-- a set is wrong, the result is a wrong hint, never more. The match of a worker has at least `low` and at most `high`
-- named blocks.

-- Digests by position, cut from the chain of the decision `cut_for` at their first lookup. Allocated once for all
-- decisions: growing a table costs more than filling it.
local cut, cut_for, decisions = {}, {}, 0
for position = 1, MAX_NAMED_BLOCKS do
  cut[position], cut_for[position] = '', 0
end

local WRONG_HINTS = 2 -- in a row, after which the end of the last match is not a hint for the next one

-- Four functions:
--   digest(position)         of one named block
--   look(worker, position)   looks up one named block between `low` and `high`
--   search(worker, least)    narrows `low` and `high` until `high` is at most `least`, or both are equal
--   on_device(worker)        length of the part of a known match that is on the device
local function chain_search(state, chain)
  decisions = decisions + 1
  local pcall, sub, decision = redis.pcall, string.sub, decisions
  local last, wrong = 0, 0 -- end of a previous match: workers mostly share the same prefix

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

  -- Number of named blocks of the match before those that are in host memory alone. The device evicts the end of a path
  -- first, so it has the beginning of a match.
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
