# The repository, installed, as the working directory; versions from uv.lock.
#
#   docker build -t jaxline .                              # CPU
#   docker build -t jaxline --build-arg EXTRA=gpu .        # CUDA 12, or cuda13
#   docker build -t jaxline --build-arg EXTRA=tpu .        # launch/jobset.yaml
#   docker run --rm jaxline --config=configs/lm.py
#   docker run --rm --gpus=all jaxline --config=configs/lm.py
FROM python:3.13-slim

ARG EXTRA=""
ENV PATH=/jaxline/.venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /jaxline

RUN pip install --no-cache-dir 'uv>=0.9'
# The requirements are a layer of their own: a change of code installs no more.
COPY pyproject.toml uv.lock ./
RUN uv sync --frozen --no-cache --no-install-project ${EXTRA:+--extra=$EXTRA}
COPY . .
RUN uv sync --frozen --no-cache ${EXTRA:+--extra=$EXTRA}

# No shell between: it would keep SIGTERM, on which a run saves, to itself.
ENTRYPOINT ["python", "experiment.py"]
