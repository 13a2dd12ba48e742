# Installs the repository, with the versions of uv.lock. The repository is the
# working directory.
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
# The requirements are a separate layer, so a change of the code does not install
# them again.
COPY pyproject.toml uv.lock ./
RUN uv sync --frozen --no-cache --no-install-project ${EXTRA:+--extra=$EXTRA}
COPY . .
RUN uv sync --frozen --no-cache ${EXTRA:+--extra=$EXTRA}

# Do not use a shell: it would not pass on SIGTERM, which makes a run save.
ENTRYPOINT ["python", "experiment.py"]
