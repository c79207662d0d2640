# The image for kcoord's data pipeline: a driver, a master or a worker of Spark, or `kcoord lake` on one machine.
# BASE_IMAGE: a Debian or Ubuntu image with Python >= 3.11 and its venv module, for example python:3.13-slim-bookworm.
ARG BASE_IMAGE=python:3.13-slim-bookworm

FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY requirements/build.lock requirements/spark.lock requirements/
RUN python3 -m venv /opt/build && /opt/build/bin/python -m pip install --no-cache-dir --require-hashes -r requirements/build.lock \
 && python3 -m venv /opt/kcoord && /opt/kcoord/bin/python -m pip install --no-cache-dir --require-hashes -r requirements/spark.lock
COPY pyproject.toml README.md LICENSE ./
COPY schemas schemas
COPY protocol protocol
COPY kcoord kcoord
RUN /opt/build/bin/python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist . \
 && /opt/kcoord/bin/python -m pip install --no-cache-dir --no-deps --no-index /dist/*.whl \
 && /opt/kcoord/bin/python -m pip uninstall --yes --quiet pip

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="kcoord-spark" \
      org.opencontainers.image.description="Spark with the data pipeline of kcoord" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Spark's scripts call ps. The manual pages of Java have a folder that slim images lack.
RUN mkdir -p /usr/share/man/man1 && apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless procps \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home spark
COPY --from=build /opt/kcoord /opt/kcoord
ENV PATH=/opt/kcoord/bin:$PATH \
    PYSPARK_PYTHON=/opt/kcoord/bin/python \
    SPARK_WORKER_DIR=/home/spark/work \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/spark
CMD ["kcoord", "lake", "--help"]
