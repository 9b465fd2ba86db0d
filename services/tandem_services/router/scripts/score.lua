-- The price of a choice, in seconds. router/cost.py is the same model in Python, with the reasons; a property
-- test holds the two together.
--
--   prefix_fetch     what bringing a prefix from another worker takes beyond the queue, where that pays (fetch.lua)
--   prefill_queue    (tokens queued + reserved) × seconds per token
--   prefill_compute  prompt tokens neither cached nor fetched × seconds per token; one at least is always computed
--   prefill_stall    prefill_compute × sequences that wait for it, now and later; what fetched tokens push out
--   transfer         handoff messages + prompt tokens that the decode worker lacks × seconds to move one
--   decode_load      (sequences there + reserved) × step time: what one more sequence costs its neighbours
--   decode_room      NO_ROOM_S when the sequence would have to wait for others to end

local function missing_after(tokens, query)
  return math.max(1, query.prompt_tokens - tokens)
end

local function uncached(worker, query)
  return missing_after(worker.matched, query)
end

local function prefill_queue(worker)
  return worker.queue_tokens * worker.token_s
end

local function prefill_compute(worker, query)
  return missing_after(worker.known, query) * worker.token_s
end

local function waiting_sequences(worker)
  if worker.role == ROLE_PREFILL then return FOLLOWERS end
  return worker.sequences + (worker.role == ROLE_DECODE and COMING or 0) + FOLLOWERS
end

-- Of a second copy of that many tokens: what it pushes out of the cache is computed again.
local function copy(worker, tokens)
  return tokens * worker.token_s * COPY_FOLLOWERS
end

local function prefill_stall(worker, query)
  return prefill_compute(worker, query) * waiting_sequences(worker) + copy(worker, worker.known - worker.matched)
end

local function transfer(worker, query, token_s)
  return HANDOFF_S + uncached(worker, query) * token_s
end

local function decode_load(worker)
  return worker.sequences * worker.step_s
end

local function decode_room(worker, query)
  local full = worker.sequences >= worker.max_sequences
    or query.prompt_tokens + query.output_tokens > worker.room_tokens
  return full and NO_ROOM_S or 0
end

-- Of a fetch of that many seconds: while it lasts, the queue gets shorter.
local function fetch_wait(worker, fetch_s)
  return math.max(0, fetch_s - prefill_queue(worker))
end

-- What the worker costs as the end that computes and as the end that holds the sequence.
local function price(worker, query)
  worker.compute_s = prefill_queue(worker) + fetch_wait(worker, worker.fetch_s)
    + prefill_compute(worker, query) + prefill_stall(worker, query)
  worker.hold_s = decode_load(worker) + decode_room(worker, query)
  worker.alone_s = worker.compute_s + worker.hold_s
end

-- `token_s` of a pair: seconds to move one token over the link between its ends.
local function terms_of(choice, query)
  local computing = choice.prefill or choice.decode
  return {
    prefix_fetch = fetch_wait(computing, computing.fetch_s),
    prefill_queue = prefill_queue(computing), prefill_compute = prefill_compute(computing, query),
    prefill_stall = prefill_stall(computing, query),
    transfer = choice.prefill and transfer(choice.decode, query, choice.token_s) or 0,
    decode_load = decode_load(choice.decode), decode_room = decode_room(choice.decode, query),
  }
end

-- The PAIR_ENDS entries of lowest `field`. Looked at from anywhere on, so that which of equals is left to chance.
local function shortlist(entries, field)
  local count = #entries
  if count <= PAIR_ENDS then return entries end
  local short, start = {}, math.random(count)
  for step = 1, count do
    local entry = entries[(start + step) % count + 1]
    local value, place = entry[field], #short
    if place < PAIR_ENDS or value < short[place][field] then
      if place == PAIR_ENDS then place = place - 1 end
      while place > 0 and value < short[place][field] do
        short[place + 1] = short[place]
        place = place - 1
      end
      short[place + 1] = entry
    end
  end
  return short
end

-- One of the entries within TIE_S of the lowest `field`, at random.
local function cheapest(entries, field)
  local best = math.huge
  for i = 1, #entries do
    if entries[i][field] < best then best = entries[i][field] end
  end
  local ties = {}
  for i = 1, #entries do
    if entries[i][field] <= best + TIE_S then ties[#ties + 1] = entries[i] end
  end
  return ties[math.random(#ties)]
end
