# SPDX-License-Identifier: Apache-2.0
"""Counts which error branches of the server the runs reach ("sometimes" assertions).

Covered are the coordinators, the handlers for groups, offsets and transactions, their services and the fast paths. An
error branch is an expression `Errors.X` inside one of their functions, other than in a comparison or a pattern.

While `Reached` is in use, functions with such branches run a compiled copy in which each branch reports itself. At the
end they get their own code back, so production code does not depend on this module.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Final, TypeVar

T = TypeVar("T")

PACKAGES: Final = ("kcoord.coordinator.group", "kcoord.runtime", "kcoord.coordinator.transaction", "kcoord.server.fast")
HANDLERS: Final = (
    *("consumer_group_heartbeat", "join_group", "sync_group", "heartbeat", "leave_group", "consumer_group_describe"),
    *("offset_commit", "offset_fetch", "offset_delete", "delete_groups", "list_groups", "describe_groups", "metadata"),
    *("init_producer_id", "add_offsets_to_txn", "txn_offset_commit", "end_txn", "describe_transactions"),
)
"""Handlers of the APIs for groups, offsets and transactions, and of Metadata."""
MODULES: Final = (
    *(f"kcoord.server.api.handlers.{name}" for name in HANDLERS),
    *("kcoord.server.api.fan_out", "kcoord.server.api.split_topics"),
    *("kcoord.server.shards.group_service", "kcoord.server.shards.shard_service"),
    "kcoord.server.shards.transaction_service",
)
EXCUSED: Final = {
    "group.regex.validate INVALID_REGULAR_EXPRESSION": "needs an expression of 8 KiB",
    "group.consumer.assignment.CurrentAssignmentBuilder.build FENCED_MEMBER_EPOCH": (
        "needs a member state that only a later version writes"
    ),
    "kcoord.runtime.shard_context.ShardContext.run NOT_COORDINATOR": "needs a broken invariant of the broker",
    "kcoord.runtime.shard_context.ShardContext.defer NOT_COORDINATOR": "needs a broken invariant of the broker",
    "kcoord.runtime.shard_context.ShardContext.run UNKNOWN_SERVER_ERROR": "needs an unexpected exception",
    "kcoord.runtime.shard_context.ShardContext._append_and_replay NOT_COORDINATOR": "needs a replay that fails",
    "group.consumer.classic_members._subscription UNKNOWN_SERVER_ERROR": "the error of Kafka 4.3; runs are of 4.4",
    "group.offsets.operations._may_commit_in_transaction GROUP_ID_NOT_FOUND": "members of runs send TxnOffsetCommit v5",
    "kcoord.runtime.shard_context.ShardContext.expire_replies COORDINATOR_NOT_AVAILABLE": "needs a disk that hangs",
    "group.shard.GroupCoordinatorShard.end_transaction INVALID_PRODUCER_EPOCH": (
        "needs a marker of an earlier epoch: no transaction begins before the markers of the last one are written, so "
        "only a WriteTxnMarkers request from another broker has one"
    ),
    "group.consumer.client_computation.end_install GROUP_ID_NOT_FOUND": (
        "needs a group that is deleted while a thread checks the assignment of its last member"
    ),
    "api.handlers.consumer_group_heartbeat.check_consumer_protocol UNSUPPORTED_VERSION": "the protocol is enabled",
    "api.handlers.init_producer_id.handle UNSUPPORTED_VERSION": "version 6 only, which is not served",
    "api.handlers.init_producer_id.handle TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "version 6 only, which is not served",
    "api.handlers.metadata._creatable TOPIC_AUTHORIZATION_FAILED": "topics of runs are not created automatically",
    "api.handlers.metadata._partition LEADER_NOT_AVAILABLE": "every partition has a leader",
    "api.handlers.txn_offset_commit.error_response COORDINATOR_NOT_AVAILABLE": "version 1 only, while a shard loads",
    "group.offsets.operations.delete_offsets UNKNOWN_TOPIC_OR_PARTITION": "the handler rejects the topic first",
    "kcoord.runtime.upstream_membership.UpstreamMembership.synced UNSUPPORTED_VERSION": "needs a later release",
    "kcoord.runtime.upstream_log.UpstreamLog._end_batch COORDINATOR_NOT_AVAILABLE": (
        "needs a batch of an earlier owner in the same place of the client's next transaction, which few seeds show"
    ),
    "kcoord.runtime.serde.check_size MESSAGE_TOO_LARGE": "needs more offsets in one commit than a run has partitions",
    "api.handlers.offset_commit.error_response INVALID_COMMIT_OFFSET_SIZE": (
        "needs more partitions than a topic of a run has"
    ),
}
"""Branches that no run can reach, with the reason. Unit tests reach them."""
_REPORTER: Final = "__reached__"
_PREFIXES: Final = ("kcoord.coordinator.", "kcoord.server.")


class _Instrument(ast.NodeTransformer):
    """Turns `Errors.X` into `__reached__("place", Errors.X)`, and collects the places."""

    def __init__(self, module: str) -> None:
        self.places: list[str] = []
        self._module = module.removeprefix(_PREFIXES[0]).removeprefix(_PREFIXES[1])
        self._path: list[str] = []
        self._functions = 0

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._inside(node, node.name, is_function=False)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._inside(node, node.name, is_function=True)

    def _inside(self, node: ast.AST, name: str, *, is_function: bool) -> ast.AST:
        self._path.append(name)
        self._functions += is_function
        self.generic_visit(node)
        self._functions -= is_function
        self._path.pop()
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        is_error = isinstance(node.value, ast.Name) and node.value.id == "Errors"
        if not is_error or node.attr == "NONE" or not self._functions:
            return self.generic_visit(node)
        place = f"{self._module}.{'.'.join(self._path)} {node.attr}"
        count = sum(earlier == place or earlier.startswith(f"{place} #") for earlier in self.places)
        place = f"{place} #{count + 1}" if count else place
        self.places.append(place)
        call = ast.Call(ast.Name(_REPORTER, ast.Load()), [ast.Constant(place), node], [])
        return ast.copy_location(call, node)


class Reached:
    """A context manager that counts error branches. `places` are all branches, `counts` how often runs reached them."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.counts: Counter[str] = Counter()
        self._originals: list[tuple[FunctionType, CodeType]] = []

    def __enter__(self) -> Reached:
        for module in _modules():
            self._instrument(module)
        return self

    def __exit__(self, *details: object) -> None:
        for function, code in self._originals:
            function.__code__ = code
        self._originals.clear()

    def never(self) -> list[str]:
        """Returns the branches that no run has reached, without the excused ones."""
        return [place for place in self.places if not self.counts[place] and EXCUSED.get(place) is None]

    def lines(self) -> Iterator[str]:
        """Yields the report: all branches with their counts, and the reasons of excused ones."""
        reached = sum(1 for place in self.places if self.counts[place])
        yield f"{reached} of {len(self.places)} error branches reached, {len(self.never())} missing"
        for place in sorted(self.places):
            reason = EXCUSED.get(place)
            yield f"  {self.counts[place]:>8} {place}{'' if reason is None else f' ({reason})'}"

    def _report(self, place: str, value: T) -> T:
        self.counts[place] += 1
        return value

    def _instrument(self, module: ModuleType) -> None:
        tree = ast.parse(inspect.getsource(module))
        instrument = _Instrument(module.__name__)
        changed = ast.fix_missing_locations(instrument.visit(tree))
        if not instrument.places:
            return
        self.places += instrument.places
        setattr(module, _REPORTER, self._report)
        file = module.__file__ or module.__name__
        codes = dict(_functions_of(compile(changed, file, "exec")))
        for function in _functions_in(module):
            code = codes.get(function.__code__.co_qualname)
            if code is not None and code.co_freevars == function.__code__.co_freevars:
                self._originals.append((function, function.__code__))
                function.__code__ = code


def _modules() -> Iterator[ModuleType]:
    for package in PACKAGES:
        root = importlib.import_module(package)
        yield root
        for module in pkgutil.walk_packages(root.__path__, f"{package}."):
            yield importlib.import_module(module.name)
    for name in MODULES:
        yield importlib.import_module(name)


def _functions_of(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Yields the code of every function and method with its qualified name, without functions inside functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & inspect.CO_NEWLOCALS:
                yield constant.co_qualname, constant
            else:
                yield from _functions_of(constant)


def _functions_in(module: ModuleType) -> Iterator[FunctionType]:
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            yield value
        elif isinstance(value, type):
            for member in vars(value).values():
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if isinstance(function, FunctionType):
                    yield function
