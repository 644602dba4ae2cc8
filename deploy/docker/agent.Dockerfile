# Adds rankwatch to your training image. Instead, you can copy the last two lines into your own Dockerfile.
#
#     docker build -f deploy/docker/agent.Dockerfile --build-arg BASE=YOUR/IMAGE:TAG -t YOUR/IMAGE:TAG-rankwatch .
#
# pip adds pyzmq and msgpack; the image's torch and NumPy stay as they are.
ARG BASE=pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime
# hadolint ignore=DL3006 (BASE has the tag)
FROM ${BASE}
COPY . /opt/rankwatch-src
RUN python -m pip install --no-cache-dir /opt/rankwatch-src
