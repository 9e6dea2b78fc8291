# The wheel, built with CUDA 13.0 and installed beside PyTorch's CUDA build:
#   docker build -t fused_moe . && docker run --rm --gpus all fused_moe
FROM nvidia/cuda:13.0.2-devel-ubuntu22.04 AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ make python3-dev python3-venv
WORKDIR /fused_moe
COPY . .
RUN make wheel

FROM python:3.12-slim
COPY --from=build /fused_moe/dist/*.whl /wheels/
RUN pip install --no-cache-dir /wheels/*.whl && python -m fused_moe
CMD ["python", "-m", "fused_moe"]
