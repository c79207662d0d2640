# SPDX-License-Identifier: Apache-2.0
"""A broker process that is killed again and again under clients that note what was promised to them."""
