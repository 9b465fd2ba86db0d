-- The price of a choice, in seconds. router/scoring.py is the same formula in Python; a property test
-- holds the two together.
--
--   prefill_queue    (tokens queued + reserved) × seconds per token
--   prefill_compute  uncached prompt tokens × seconds per token; at least one token is always computed
--   transfer         handoff messages + prompt tokens that the decode worker lacks × seconds to move one
--   decode_load      (sequences there + reserved) × step time: what one more sequence costs its neighbours
--   decode_room      NO_ROOM_S when the sequence would have to wait for others to end

local function prefill_queue(worker)
  return worker.queue_tokens * worker.token_s
end

local function prefill_compute(worker, query)
  return math.max(1, query.prompt_tokens - worker.matched) * worker.token_s
end

local function transfer(worker, query)
  return HANDOFF_S + math.max(0, query.prompt_tokens - worker.matched) * worker.transfer_token_s
end

local function decode_load(worker)
  return worker.sequences * worker.step_s
end

local function decode_room(worker, query)
  local full = worker.sequences >= worker.max_sequences
    or query.prompt_tokens + query.output_tokens > worker.room_tokens
  return full and NO_ROOM_S or 0
end

-- What the worker costs as the end that computes, that holds the sequence, and that also receives its KV.
local function price(worker, query)
  worker.compute_s = prefill_queue(worker) + prefill_compute(worker, query)
  worker.hold_s = decode_load(worker) + decode_room(worker, query)
  worker.receive_s = transfer(worker, query) + worker.hold_s
  worker.alone_s = worker.compute_s + worker.hold_s
end

local function terms_of(choice, query)
  local computing = choice.prefill or choice.decode
  return {
    prefill_queue = prefill_queue(computing), prefill_compute = prefill_compute(computing, query),
    transfer = choice.prefill and transfer(choice.decode, query) or 0,
    decode_load = decode_load(choice.decode), decode_room = decode_room(choice.decode, query),
  }
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
