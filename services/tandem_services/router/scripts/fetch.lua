-- Which worker would better fetch a prefix than compute it, and from whom. router/fetching.py is the same in Python, with
-- the reasons; a property test holds the two together.

-- Until a worker looks at its messages again, at most.
local function turn(worker)
  local decode = worker.sequences > 0 and worker.step_s or 0
  return math.min(worker.queue_tokens, TURN_TOKENS) * worker.token_s + decode
end

-- Seconds to move one token from `from` to each of `workers`, by its own figures. What it has none for, or one that makes
-- no sense, costs what its links cost typically.
local function links_to(state, from, workers, names)
  local found = redis.pcall('HMGET', state.prefix .. 'links:' .. from.incarnation, unpack(names))
  local token_s = {}
  for i = 1, #workers do
    local figure = tonumber(found[i] or nil)
    token_s[i] = figure and figure >= 0 and figure <= BROKEN_TOKEN_S and figure or from.transfer_token_s
  end
  return token_s
end

-- Have `worker` fetch from `source` if that is cheaper than what it would do so far.
local function consider(worker, source, token_s, query)
  local seconds = FETCH_S + FETCH_TURNS * turn(source) + (source.matched - worker.matched) * token_s
  local saved = (missing_after(worker.known, query) - missing_after(source.matched, query)) * worker.token_s
  local added = fetch_wait(worker, seconds) - fetch_wait(worker, worker.fetch_s)
    + copy(worker, source.matched - worker.known)
  if added < saved * (1 + waiting_sequences(worker)) then
    worker.known, worker.fetch_s, worker.source = source.matched, seconds, source
  end
end

-- Fetches for those of `workers` that may compute, and their prices anew. The longest matches are looked at.
local function consider_fetches(state, workers, query)
  local having = {}
  for _, worker in ipairs(workers) do
    worker.lacking = -worker.matched
    if worker.matched > 0 then having[#having + 1] = worker end
  end
  for _, source in ipairs(shortlist(having, 'lacking')) do
    local short, names = {}, {}
    for _, worker in ipairs(workers) do
      if worker.computes and worker.matched < source.matched then
        short[#short + 1], names[#names + 1] = worker, worker.incarnation
      end
    end
    if #short > 0 then
      local token_s = links_to(state, source, short, names)
      for i, worker in ipairs(short) do consider(worker, source, token_s[i], query) end
    end
  end
  for _, worker in ipairs(workers) do
    if worker.source then price(worker, query) end
  end
end
