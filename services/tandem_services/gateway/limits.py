"""Every bound on client input, checked before anything is allocated or sent, and the memory budget of request bodies.

Bounds on single sampling parameters are in `tandem_engine.messages.sampling`; the engine checks them again.

`BodyBudget` bounds the bytes of request bodies that a gateway holds, in total and for each client (a tenant where there
are keys, else an address):

    1. announced  a body whose Content-Length does not fit is rejected before it is read
    2. charged    each piece is charged on arrival; a piece that does not fit is dropped and ends the request
    3. released   when the request has been parsed and turned into token ids, or has ended

A body larger than the whole budget is a 413, any other a 429. Announced bytes are not charged, so a client that
announces a large body and sends nothing takes no memory from others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_engine.base.logs import quoted
from tandem_engine.messages.sampling import MAX_STOP_STRINGS
from tandem_services.common.errors import ApiError, bad_request

MAX_BODY_BYTES = 32 << 20
BODIES_BYTES = 256 << 20

BODIES_BYTES_PER_CLIENT = 64 << 20
"""Of bodies in flight, by default; the second two of the largest."""

PARSED_HERE_BYTES = 256 << 10
"""Longer bodies are parsed by a thread: these take the event loop less than 10 ms."""

BODY_TIMEOUT_S = 30.0
"""From the headers to the end of the body."""

MAX_BODY_PIECES = 16_384

MIN_PIECE_BYTES = 32
"""On average, of a body that comes in more pieces than that: chunks, or parts of them as the network brings them."""

MAX_CONNECTIONS = 4096
"""Of one port of one gateway, idle ones among them."""

HEAD_TIMEOUT_S = 30.0
"""From the connection, or a request's first byte, to the end of its headers."""

LINGER_S = 0.5
"""That an idle connection stays open after shutdown has begun, for a request that its client has just sent."""

SEND_STALL_S = 60.0
"""A client that takes nothing of an answer for so long has left. nginx's default."""

MAX_HEAD_BYTES = 64 << 10
"""What is kept of a head that has not ended; what it may have when it has is the next three."""

MAX_HEADER_FIELDS = 64
MAX_HEADER_BYTES = 32 << 10
MAX_URL_BYTES = 8 << 10
MAX_REQUEST_ID_CHARACTERS = 128

MAX_ERROR_CHARACTERS = 1000
"""Of a message that an error brings."""

MAX_PROMPTS = 1024
MAX_EMBEDDING_INPUTS = 2048

MAX_DIMENSIONS = 2**31 - 1
"""What travels to workers, of which only they know how many their model has."""

MAX_TURN = 2**31 - 1
"""Of a session."""

MAX_CHOICES = 128
"""n, and n times the number of prompts."""

MAX_BEST_OF = 20
MAX_MESSAGES = 2048
MAX_OUTPUT_TOKENS = 2**31 - 1
MAX_CHAT_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 20
MAX_BAD_WORD_CHARACTERS = 256
MAX_CACHE_SALT_CHARACTERS = 1024
MAX_USER_CHARACTERS = 512
MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512

SHORT_TEXT_CHARACTERS = 4096
"""Longer texts have tokenizer threads of their own; these take the tokenizer less than a millisecond."""

BRIEF_TEXT_CHARACTERS = 512
"""Texts up to this length, without tools and variables, are encoded on the event loop: a few hundred microseconds, of
which a thread's turns would take as much again."""

BRIEF_TEXTS_S = 0.001
"""Of an iteration of the event loop; texts that come after so much wait for the threads."""

MAX_TOKENIZER_JOBS = 4096

MAX_TOKENIZER_CHARACTERS = 64 << 20
"""Of texts that wait for the tokenizer: about ten seconds of a thread's time."""


def check_choices(n: int, prompts: int) -> None:
    if not 1 <= n <= MAX_CHOICES:
        raise bad_request(f"n must be between 1 and {MAX_CHOICES}, got {quoted(n)}", "n")
    if prompts > MAX_PROMPTS:
        raise bad_request(f"prompt takes at most {MAX_PROMPTS} prompts, got {prompts}", "prompt")
    if n * prompts > MAX_CHOICES:
        raise bad_request(f"n times prompts must be at most {MAX_CHOICES}, got {n} × {prompts}", "n")


def url_too_long() -> ApiError:
    return ApiError(414, f"the URL is limited to {MAX_URL_BYTES} bytes", kind="UriTooLongError")


def check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise bad_request(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stop)}", "stop")


def check_cache_salt(salt: str | None) -> None:
    if salt is not None and not 1 <= len(salt) <= MAX_CACHE_SALT_CHARACTERS:
        raise bad_request(
            f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARACTERS} characters, got {len(salt)}", "cache_salt"
        )


def check_name(name: str | None, param: str) -> None:
    """Of a user, a conversation, or whatever else a client keeps apart."""
    if name is not None and len(name) > MAX_USER_CHARACTERS:
        raise bad_request(f"{param} must have at most {MAX_USER_CHARACTERS} characters, got {len(name)}", param)


def check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA_ENTRIES:
        raise bad_request(f"metadata takes at most {MAX_METADATA_ENTRIES} entries, got {len(metadata)}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARACTERS or len(value) > MAX_METADATA_VALUE_CHARACTERS:
            raise bad_request(
                f"metadata keys have at most {MAX_METADATA_KEY_CHARACTERS} characters and values at most "
                f"{MAX_METADATA_VALUE_CHARACTERS}",
                "metadata",
            )


def check_priority(priority: int) -> None:
    if not -(2**63) <= priority < 2**63:
        raise bad_request(f"priority must be a 64-bit integer, got {quoted(priority)}", "priority")


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str, *, place: str | None = None) -> None:
    """`place`: where the ids are in the request, when that is not field `param` itself."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise bad_request(
                f"{place or param}[{position}]: token id {quoted(token)} is out of vocabulary, ids are 0 to "
                f"{vocab_size - 1}",
                param,
            )


def check_context(prompt_tokens: int, max_tokens: int, context_length: int, param: str) -> None:
    """`max_tokens` is what the client asked for; 0 when it left the choice to us."""
    if prompt_tokens == 0:
        raise bad_request(f"{param} has no tokens", param)
    # A prompt that fills the context leaves no room for even one token.
    if prompt_tokens + max(max_tokens, 1) > context_length:
        raise context_exceeded(
            f"you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {param}, "
            f"{max_tokens} in the completion)",
            context_length,
            param,
        )


def check_text_length(characters: int, longest_token: int, context_length: int, param: str) -> None:
    """Refuse a text that cannot fit however it is cut into tokens, without encoding it."""
    fewest = characters // max(longest_token, 1)
    if fewest >= context_length:
        raise context_exceeded(f"you requested at least {fewest} tokens in the {param}", context_length, param)


def context_exceeded(requested: str, context_length: int, param: str) -> ApiError:
    """Clients look for it by its words (LiteLLM) or by its code in the words (LangChain)."""
    reason = "context_length_exceeded"
    return bad_request(
        f"This model's maximum context length is {context_length} tokens. However, {requested}. "
        f"Please reduce the length of the {param} or completion ({reason}).",
        param,
        reason=reason,
    )


BODIES_RETRY_S = 1.0


@dataclass(kw_only=True, slots=True)
class BodyBudget:
    """One per gateway; belongs to its event loop."""

    most: int = BODIES_BYTES
    most_per_client: int = BODIES_BYTES_PER_CLIENT
    held: int = 0
    """Bytes now, of all clients."""
    _by_client: dict[str, int] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Bytes of the longest body that is ever taken."""
        return min(MAX_BODY_BYTES, self.most, self.most_per_client)

    def held_by(self, client: str) -> int:
        return self._by_client.get(client, 0)

    def check(self, client: str, size: int) -> None:
        """Raises `ApiError` 429 when `size` more bytes of `client` do not fit now."""
        if self._by_client.get(client, 0) + size > self.most_per_client:
            raise _too_many("Your requests have too many bytes of bodies in flight. Try again later.")
        if self.held + size > self.most:
            raise _too_many("The gateway holds as many bytes of request bodies as it may. Try again later.")

    def change(self, client: str, size: int) -> None:
        """Charge, or give back where `size` is below 0."""
        self.held += size
        left = self._by_client.get(client, 0) + size
        if left:
            self._by_client[client] = left
        else:
            self._by_client.pop(client, None)


@dataclass(kw_only=True, slots=True)
class BodyCharge:
    """The bytes of one request's body."""

    budget: BodyBudget
    _client: str = ""
    _bytes: int = 0

    def announce(self, client: str, size: int) -> None:
        """`client` is to send `size` bytes, 0 where it does not say. Raises `ApiError` 413 or 429."""
        self._client = client
        self._check_length(size)
        self.budget.check(client, size)

    def hold(self, client: str, size: int) -> None:
        """All `size` bytes of the body of `client` are here. Raises as `add`."""
        self._client = client
        self.add(size)

    def add(self, size: int) -> None:
        """So many more bytes are here. Raises `ApiError` 413 or 429, and charges nothing then."""
        self._check_length(self._bytes + size)
        self.budget.check(self._client, size)
        self.budget.change(self._client, size)
        self._bytes += size

    def release(self) -> None:
        """The body is not needed any more. Idempotent."""
        if self._bytes:
            self.budget.change(self._client, -self._bytes)
            self._bytes = 0

    def _check_length(self, size: int) -> None:
        longest = self.budget.longest
        if size > longest:
            raise ApiError(413, f"request body is larger than {longest} bytes", kind="RequestEntityTooLargeError")


def _too_many(message: str) -> ApiError:
    return ApiError(429, message, kind="RateLimitError", reason="bodies_in_flight", retry_after=BODIES_RETRY_S)
