#!/usr/bin/env bash
# Download Slurm, munge, an SSH server and Chromium, which the long tests start, as Debian packages into .servers/.
# Nothing is installed in the system: the packages are unpacked, no service starts, and deleting .servers/ removes
# everything.
#
# Exit code 2 if this system cannot run them: they need Debian or Ubuntu, and root for a mount namespace of their own.
set -euo pipefail
cd "$(dirname "$0")/.."
servers=(slurmctld slurmd slurm-client munge openssh-server openssh-client chromium)
stamp=.servers/.installed
wanted=$(cksum < tools/install_servers.sh)
[ "$(cat "$stamp" 2> /dev/null)" != "$wanted" ] || exit 0

refuse() {
    echo "install_servers: $*; LMTRAIN_SYSTEM_TESTS=0 leaves out the tests of these servers" >&2
    exit 2
}

command -v apt-get > /dev/null || refuse "no apt-get: Slurm and the SSH server come from Debian's or Ubuntu's packages"
[ "$(id -u)" -eq 0 ] || refuse "the servers need root: run this script as root"
unshare --mount true 2> /dev/null || refuse "no mount namespaces here (unshare --mount): a container needs --privileged"
download() {
    # The packages that the system lacks, libraries included; the servers even if the system has them.
    missing=$(apt-get install --simulate --no-install-recommends "${servers[@]}" | sed -n 's/^Inst \([^ ]*\).*/\1/p')
    rm -rf .servers
    mkdir -p .servers/packages
    # shellcheck disable=SC2086
    (cd .servers/packages && printf '%s\n' $missing "${servers[@]}" slurm-wlm-basic-plugins | sort -u |
        xargs apt-get -o APT::Sandbox::User=root download -q)
}
# the lists of packages may be missing, or older than the mirror
download || { apt-get update -q && download; } || refuse "the packages cannot be downloaded"
for package in .servers/packages/*.deb; do
    dpkg-deb --extract "$package" .servers
done
rm -r .servers/packages
for program in .servers/usr/*bin/*-wlm; do # names that Debian's alternatives would create
    [ ! -e "$program" ] || ln -sf "${program##*/}" "${program%-wlm}"
done
echo "$wanted" > "$stamp"
