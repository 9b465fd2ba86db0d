"""What the processes of one deployment derive from its key file: a Redis namespace, and signatures of what they write.

Redis is shared, so its content is untrusted until a signature proves it:

    namespace  part of every key's name: two deployments with the same cluster name and different keys never meet
    row        a worker signs its whole description; readers drop rows without a valid signature
    claim      a worker signs its incarnation: "this incarnation exists", by which it holds its worker's name
    start      a worker that is not registered yet signs its incarnation, role and model
    adapter    a gateway signs what the name of an adapter stands for, with a revision if a command has registered it,
               and names of adapters that are expected
    tokenizer  a gateway signs which tokenizer the workers of a model had, by digest
    verdict    why an incarnation has ended: the claim of a newer incarnation of the same worker, or a sentence signed
               by a process of the deployment (a peer that found it dead, or the worker itself as it exits, which also
               states whether the kernel killed its engine because memory was short)

A signature contains no time. An old row that is written again is therefore valid, but names an incarnation that answers
no pings and is not offered for that reason; new requests wait a bounded time for one that starts. An old claim or
verdict remains true.

Without a key file (loopback only) there is no secret and no namespace: signatures then only detect damage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from hmac import compare_digest

from tandem_engine.ipc.keys import KeyPair

PROOF_BYTES = 16
NAMESPACE_BYTES = 8

PROOF_FIELD = "proof"
"""Name of the field of a row that has its proof."""

_VERDICT, _FOR_MEMORY = "verdict", "verdict for memory"
"""Kinds of proof. The cause is in the proof, so the scripts read all verdicts alike."""

UNSIGNED_FIELDS = frozenset({PROOF_FIELD, "number"})
"""`number` is written by the script."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The deployment that a process belongs to. `secret` comes from the key file; empty without one."""

    secret: bytes = field(default=b"", repr=False)
    _key: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_key", blake2b(b"registry", key=self.secret, digest_size=32).digest())

    @staticmethod
    def of(keys: KeyPair | None) -> "Deployment":
        return Deployment(b"" if keys is None else keys.secret)

    @property
    def namespace(self) -> str:
        """16 hex digits; "" without a key file. Reveals nothing about the secret."""
        if not self.secret:
            return ""
        return blake2b(b"registry namespace", key=self.secret, digest_size=NAMESPACE_BYTES).hexdigest()

    def row_proof(self, fields: Mapping[str, str]) -> str:
        """Proof of a row as it is read back; `UNSIGNED_FIELDS` do not count."""
        return self._proof("row", *(part for pair in sorted(fields.items()) for part in _signed(*pair)))

    def wrote(self, fields: Mapping[str, str]) -> bool:
        """Whether a process of this deployment wrote this row."""
        return _equal(fields.get(PROOF_FIELD, ""), self.row_proof(fields))

    def adapter_proof(self, model: str, content: str) -> str:
        """Proof of an entry of a registered adapter."""
        return self._proof("adapter", model, content)

    def registered(self, model: str, content: str, *, proof: str) -> bool:
        """Whether a process of this deployment wrote this entry."""
        return _equal(proof, self.adapter_proof(model, content))

    def reported_adapter_proof(self, model: str, content: str) -> str:
        """Proof of what workers of `model` have reported under a name of an adapter."""
        return self._proof("reported adapter", model, content)

    def reported_adapter(self, model: str, content: str, *, proof: str) -> bool:
        """Whether a process of this deployment wrote this."""
        return _equal(proof, self.reported_adapter_proof(model, content))

    def announced_adapters_proof(self, model: str, content: str) -> str:
        """Proof of the names of adapters that `model` is expected to have."""
        return self._proof("announced adapters", model, content)

    def announced_adapters(self, model: str, content: str, *, proof: str) -> bool:
        """Whether a process of this deployment wrote these."""
        return _equal(proof, self.announced_adapters_proof(model, content))

    def tokenizer_proof(self, model: str, digest: str) -> str:
        """Proof that workers of `model` have reported the tokenizer with this digest."""
        return self._proof("tokenizer", model, digest)

    def reported(self, model: str, digest: str, *, proof: str) -> bool:
        """Whether a process of this deployment wrote that workers of `model` have this tokenizer."""
        return _equal(proof, self.tokenizer_proof(model, digest))

    def start_proof(self, incarnation: str, *, role: str, model: str) -> str:
        """Proof that this incarnation starts, or has started."""
        return self._proof("start", incarnation, role, model)

    def starts(self, incarnation: str, *, role: str, model: str, proof: str) -> bool:
        """Whether a process of this deployment has signed that this incarnation starts."""
        return _equal(proof, self.start_proof(incarnation, role=role, model=model))

    def claim(self, incarnation: str) -> str:
        """By which `incarnation` holds the name of its worker."""
        return f"{incarnation} {self._proof('claim', incarnation)}"

    def claimant(self, claim: str) -> str | None:
        """The incarnation of a claim that this deployment has signed; None for anything else."""
        incarnation, _, proof = claim.partition(" ")
        return incarnation if _equal(proof, self._proof("claim", incarnation)) else None

    def verdict(self, on: str, *, by: str, for_memory: bool = False) -> str:
        """A signed statement by `by` that the incarnation `on` has ended. `for_memory`: the kernel killed it because
        memory was short."""
        return f"{by} {self._proof(_FOR_MEMORY if for_memory else _VERDICT, on, by)}"

    def condemner(self, verdict: str, on: str) -> str | None:
        """The signer of the verdict on `on`; None when no process of this deployment has signed it."""
        by, _, proof = verdict.partition(" ")
        if _equal(proof, self._proof(_VERDICT, on, by)) or self.was_for_memory(verdict, on):
            return by
        return by if self.claimant(verdict) is not None and supersedes(by, on) else None

    def was_for_memory(self, verdict: str, on: str) -> bool:
        """Whether the deployment has signed that the kernel killed `on` because memory was short."""
        by, _, proof = verdict.partition(" ")
        return _equal(proof, self._proof(_FOR_MEMORY, on, by))

    def _proof(self, kind: str, *parts: str) -> str:
        digest = blake2b(key=self._key, digest_size=PROOF_BYTES)
        for part in (kind, *parts):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8) + data)
        return digest.hexdigest()


def supersedes(incarnation: str, other: str) -> bool:
    """Whether both are of one worker, and `incarnation` is the newer."""
    name, _, number = incarnation.rpartition("@")
    other_name, _, other_number = other.rpartition("@")
    if name != other_name or not (number.isascii() and number.isdigit() and other_number.isdigit()):
        return False
    return (len(number), number) > (len(other_number), other_number)


def _signed(name: str, value: str) -> tuple[str, ...]:
    return () if name in UNSIGNED_FIELDS else (name, value)


def _equal(given: str, proof: str) -> bool:
    return compare_digest(given.encode("utf-8", "surrogatepass"), proof.encode("ascii"))
