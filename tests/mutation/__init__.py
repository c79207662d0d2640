# SPDX-License-Identifier: Apache-2.0
"""Mutation testing (`make mutate`): small random faults in the product, which the tests have to notice.

Theory of operation. `mutants` lists every mutant of a source file: one changed operator or operand, or one call left
out. `draw` takes some of them by a hash of the seed and the text of the line, so a draw stays the same while other code
changes. `call_map` runs the unit tests once, without a mutant, and keeps which functions each test calls.
`trial` runs one mutant in a forked process: an import hook gives the mutated module, so no file on disk changes. The
unit tests that call the mutated function run, first those that call little else. If none fails, the system runs: the
simulation with its seeds, or for the client tests against a real broker. A mutant is killed if a test or a seed fails,
or if the time is up. `equivalent.toml` lists mutants that no test can kill, with the reason.
"""
