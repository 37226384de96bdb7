#!/usr/bin/env bash
# bash start_once.sh COMMAND...: stops Ray on this machine and starts it by COMMAND, unless what runs here was started
# from this code and this configuration. So `ray up` on a cluster that is up to date stops nothing.
set -eu

started=~/.slipstream-started
configuration=~/ray_bootstrap_config.yaml
code=$(cd "$(dirname "$0")/../.." && pwd)

# `ray up` notes in the configuration whether it was called with --no-restart, which changes nothing here.
fingerprint() {
    {
        echo "$@"
        sed 's/"no_restart": [a-z]*//' "$configuration"
        find "$code" -name '.?*' -prune -o -type f ! -name '*.pyc' ! -path '*.egg-info/*' -print0 |
            LC_ALL=C sort -z | xargs -0 sha256sum
    } | sha256sum
}

now=$(fingerprint "$@")
if [ "$(cat "$started" 2> /dev/null)" = "$now" ] && ray health-check --address 127.0.0.1:6379 > /dev/null 2>&1; then
    echo "Ray runs here with this code and this configuration: nothing to do. To restart it: ray down, ray up."
    exit
fi
rm -f "$started"
ray stop
"$@"
echo "$now" > "$started"
