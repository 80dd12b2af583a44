# etcd as Debian has it: the version that the tests of this project run.
FROM debian:bookworm-slim
# The newest that Debian's stable release has, with its fixes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends etcd-client etcd-server \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=etcd --group=etcd --mode=0700 /var/lib/etcd
USER etcd
ENV ETCDCTL_API=3
ENTRYPOINT ["etcd"]
