"""kvgate as an lm-eval model: any lm-eval task, exact or under any policy.

    import lm_eval
    from kvgate.evals.lm_eval.model import KvgateLM

    lm = KvgateLM("embedded", policy="h2o@0.5")
    lm_eval.simple_evaluate(model=lm, tasks=["arc_easy"], use_cache=lm.cache_name("cache/arc"))

or by name, once this module is imported: ``model="kvgate", model_args="pretrained=embedded,policy=h2o@0.5"``.
What is evicted, and when, is written in :mod:`kvgate.evals.lm_eval.items` and :meth:`Bench.rolling`.

lm-eval's response cache keys answers by request only, so that one file would hand the answers of one model or policy to
another. lm-eval leaves a model no say in the key. Therefore the first model to use a cache file writes its identity
(weights hash, dtype, device, policy, budget, code) into it, and any other is refused; :meth:`KvgateLM.cache_name` gives
each identity a file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kvgate.engine.models import load_model
from kvgate.evals.data.items import Ids, Item, digest
from kvgate.evals.data.tokens import Tokens, render_chat
from kvgate.evals.lm_eval.bench import Bench, Settings, only
from kvgate.evals.lm_eval.items import DoesNotFit, Generation, Origin, generation_item, likelihood_items
from kvgate.evals.log.records import EXACT, CellRecord
from kvgate.evals.plan.cells import EXACT_CONFIGURATION, Configuration, configurations
from kvgate.evals.plan.config import RunConfig, SuiteChoice, parse_policy, policy_entry

IDENTITY = "kvgate identity"  # no request hashes to this: lm-eval's keys are hexadecimal


@register_model("kvgate")
class KvgateLM(TemplateLM):  # type: ignore[misc]  # lm_eval is untyped
    """An lm-eval model.

    Args:
        pretrained: "embedded", a local folder or a hub id. ``policy``: ``NAME@BUDGET`` as on the command line, or
            ``full`` for the exact run. ``dtype``, ``revision``, ``device``: as for :func:`load_model`.
        page_size, prefill_chunk, batch_rows: as in a plan. ``batch_size`` and ``max_batch_size`` are lm-eval's and
            change nothing: rows are batched up to ``batch_rows``.
    """

    def __init__(
        self,
        pretrained: str = "embedded",
        policy: str = EXACT,
        dtype: str = "bfloat16",
        revision: str | None = None,
        device: str | None = None,
        page_size: int = 16,
        prefill_chunk: int = 2048,
        batch_rows: int = 48,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        configuration = configuration_of(policy)
        loaded = load_model(pretrained, dtype=dtype, revision=revision, device=device)
        self._attach(
            Bench(loaded, [configuration], Settings(page_size, prefill_chunk, batch_rows)), configuration.label
        )

    @classmethod
    def on(cls, bench: Bench, label: str) -> KvgateLM:
        """A model that answers for one configuration of a bench; all of them share its prefills.

        Documents that the model cannot be asked are collected in ``left_out`` instead of ending the task; whoever
        evaluates must leave them out of the score. ``spanning``: those where a token spans context and continuation.
        """
        made = cls.__new__(cls)
        made._attach(bench, label)
        made.left_out = {}
        return made

    def _attach(self, bench: Bench, label: str) -> None:
        super().__init__()
        self.bench = bench
        self.label = label
        self.tokenizer = bench.loaded.tokenizer
        self._configuration = only(bench.configurations, label)
        self._device = bench.loaded.info.device
        self._opening = Tokens(self.tokenizer).bos
        self.asked: dict[Origin, list[Item]] = {}
        self.spanning: set[Origin] = set()
        self.left_out: dict[Origin, str] | None = None

    # -- what lm-eval asks for ------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each continuation, and whether greedy decoding would write it."""
        pairs = [(request, *self._encoded(request)) for request in requests]
        encoded = [(Origin.of(request), before, after) for request, before, after in pairs if after]
        items, places = likelihood_items(encoded, self.max_length)
        answers = self._answers([item for item in items if isinstance(item, Item)])
        found: list[tuple[float, bool]] = []
        at = iter(places)
        for request, _, after in pairs:
            item = items[next(at)] if after else self._empty(request)
            answer = self._likelihood(Origin.of(request), item, after, answers)
            found.append(answer)
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return found

    def _likelihood(
        self, origin: Origin, item: Item | DoesNotFit, after: Ids, answers: Mapping[str, CellRecord]
    ) -> tuple[float, bool]:
        if isinstance(item, DoesNotFit):
            self._leave_out(origin, item)
            return float("-inf"), False
        self._note(origin, item)
        candidates = item.turns[0].scoring.candidates  # type: ignore[union-attr]
        likelihoods = answers[item.item_hash].turns[0].likelihoods
        return (float("nan"), False) if likelihoods is None else likelihoods[candidates.index(after)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, cut before the first stop text."""
        asked: list[tuple[Item | None, Generation]] = []
        for request in requests:
            origin = Origin.of(request)
            text, given = request.args[:2]
            wanted = Generation.parse(given, origin)
            item = None
            try:
                item = generation_item(origin, self._ids(text), wanted, self.max_length)
                self._note(origin, item)
            except DoesNotFit as error:
                self._leave_out(origin, error)
            asked.append((item, wanted))
        answers = self._answers([item for item, _ in asked if item])
        found = []
        for (item, wanted), request in zip(asked, requests, strict=True):
            answer = answers[item.item_hash].turns[0].text if item else ""
            for stop in wanted.until:
                answer = answer.split(stop)[0]
            found.append(answer)
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts: lm-eval's disjoint windows, each under the ``chunked`` protocol.

        A text longer than the model takes several windows, which is lm-eval's own definition of this request: nothing
        is left out, every token is predicted once.
        """
        found = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=list(self._ids(text)),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [tuple(map(tuple, make_disjoint_window(window))) for window in windows]
            answer = sum(self.bench.rolling(context, rest)[self._configuration] for context, rest in pairs)
            found.append(float(answer))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return found

    def _loglikelihood_tokens(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
        raise NotImplementedError("loglikelihood needs the requests themselves")

    # -- texts and tokens -----------------------------------------------------------------------------------------

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Ids of a text that goes on: a BOS in front if the tokenizer puts one there and the text has none, and nothing
        behind. An end-of-sequence token appended to a context or an option would be all that is scored.
        """
        bos = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=False)
        return [*self._opening, *ids] if add_special_tokens else ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the model's template writes it; an unfinished last message is left open."""
        return render_chat(
            self.tokenizer,
            chat_history,
            self.bench.identity.date,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of built requests."""
        info = self.bench.loaded.info
        return f"{info.name}-{info.revision}".replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """End of sequence. ValueError if the tokenizer has none."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f"model {self.bench.loaded.info.name!r}: its tokenizer has no end-of-sequence token")
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: BOS, or EOS where there is none."""
        bos = self.tokenizer.bos_token_id
        return int(bos) if bos is not None else self.eot_token_id

    @property
    def max_length(self) -> int:
        """Positions of the model."""
        return self.bench.loaded.info.max_positions

    # -- cache ----------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """BLAKE2b-128 of everything that decides an answer besides the request."""
        configuration = self.bench.configurations[self._configuration]
        policy = [configuration.name, sorted(configuration.params.items()), configuration.request]
        others = [each.label for each in self.bench.configurations]  # they share the batch
        return digest([self.bench.fingerprint, policy, others])

    def cache_name(self, prefix: str) -> str:
        """A ``use_cache`` name that no other model, policy or budget shares."""
        return f"{prefix}-{self.identity}"

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Called by lm-eval when a response cache is opened. ValueError if it holds another identity's answers."""
        store = cache_hook.dbdict
        if store is not None:
            owner = store.get(IDENTITY)
            if owner != self.identity and (owner is not None or len(store)):
                raise ValueError(
                    "lm-eval response cache: holds answers of another model, policy or version, and its key would not "
                    "tell them apart; use use_cache=lm.cache_name(...) or another file"
                )
            store[IDENTITY] = self.identity
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> Mapping[str, Any]:
        """Written by lm-eval into its results."""
        info = self.bench.loaded.info
        return {
            "model_sha": info.revision,
            "model_dtype": info.dtype,
            "kvgate_policy": self.label,
            "kvgate_weights_hash": info.weights_hash,
            "kvgate_identity": self.identity,
        }

    # -- internals ------------------------------------------------------------------------------------------------

    def _ids(self, text: str) -> Ids:
        return tuple(self.tok_encode(text))

    def _encoded(self, request: Any) -> tuple[Ids, Ids]:
        """Context and continuation as lm-eval cuts them: both are encoded together and cut where the context alone
        ends, trailing spaces of the context going to the continuation. Where a token spans the join the two do not make
        the whole; such a document is scored as lm-eval does it and noted. If nothing is left behind the cut, it moves
        to where the encodings part.
        """
        context, continuation = request.args[:2]
        if not context:
            first, ids = self.prefix_token_id, self.tok_encode(continuation, add_special_tokens=False)
            return (first,), tuple(ids[1:] if ids[:1] == [first] else ids)
        before, after = self._encode_pair(context, continuation)
        whole = self.tok_encode(context + continuation)
        if before + after != whole:
            self.spanning.add(Origin.of(request))
            if not after:
                same = next((at for at, (one, other) in enumerate(zip(before, whole, strict=False)) if one != other), 0)
                before, after = whole[:same] or [self.prefix_token_id], whole[same:]
        return tuple(before), tuple(after)

    def _answers(self, items: Sequence[Item]) -> dict[str, CellRecord]:
        self.bench.answer(items)
        return {item.item_hash: self.bench.records[item.item_hash][self.label] for item in items}

    @staticmethod
    def _empty(request: Any) -> DoesNotFit:
        origin = Origin.of(request)
        where = f"task {origin.task}, document {origin.document}"
        return DoesNotFit(f"{where}: continuation {request.args[1]!r:.40} has no tokens of its own")

    def _leave_out(self, origin: Origin, error: DoesNotFit) -> None:
        if self.left_out is None:
            raise error
        self.left_out[origin] = str(error)

    def _note(self, origin: Origin, item: Item) -> None:
        known = self.asked.setdefault(origin, [])
        if item not in known:
            known.append(item)


def configuration_of(policy: str) -> Configuration:
    """The configuration that ``NAME@BUDGET`` names; ``full`` is the exact run. ValueError for several budgets."""
    if policy == EXACT:
        return EXACT_CONFIGURATION
    choice = parse_policy(policy_entry(policy), "lm-eval")
    if len(choice.budgets) != 1:
        raise ValueError(f"policy {policy!r}: an lm-eval model has one budget; give one")
    return configurations(RunConfig("lm-eval", (SuiteChoice("lm-eval"),), (choice,)))[1]
