# rankwatch in your own training image; or put its last two lines into your own Dockerfile:
#
#     docker build -f deploy/docker/agent.Dockerfile --build-arg BASE=YOUR/IMAGE:TAG -t YOUR/IMAGE:TAG-rankwatch .
#
# It adds pyzmq and msgpack; the image's torch and NumPy stay as they are.
ARG BASE=pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime
# hadolint ignore=DL3006 (your image's tag comes with its name)
FROM ${BASE}
COPY . /opt/rankwatch-src
RUN python -m pip install --no-cache-dir /opt/rankwatch-src
