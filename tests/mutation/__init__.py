# SPDX-License-Identifier: Apache-2.0
"""Mutation testing (`make mutate`): small random faults in the product, which the tests have to detect.

Theory of operation
-------------------
* `mutants` lists every mutant of a source file: one changed operator or operand, or one call left out.
* `mutants.draw` selects some of them by a hash of the seed and the text of the line. So a draw stays the same while
  other code changes.
* `call_map` runs the unit tests once, without a mutant, and records the functions that each test calls.
* `trial` tries one mutant in a forked process. An import hook loads the mutated module, so no file on disk changes.
  First the unit tests run that call the mutated function, those that call little else first. If none fails, the system
  runs: the simulation with its seeds, or tests of the client against a real broker.
* A mutant is killed if a test or a seed fails, or if it exceeds its time.
* `equivalent.toml` lists mutants that no test can kill, with the reason.
"""
