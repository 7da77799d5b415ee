#!/bin/bash
# Make the root directory of a container in this mount namespace: ROOT IMAGE MOUNTS [home]
# An image is a directory: its file "directories" lists directories of this host that it contains.
set -e
root=$1 image=$2 mounts=$3
[ -d "$image" ] || { echo "no image $image" >&2; exit 1; }
mount --make-rprivate /
mount -t tmpfs none "$root"
mkdir "$root/tmp" "$root/opt"
attach() { # SOURCE DIRECTORY
    [ -e "$1" ] || { echo "no directory $1 to mount" >&2; exit 1; }
    mkdir -p "$root$2"
    mount --rbind "$1" "$root$2"
}
while read -r directory; do
    if [ -L "$directory" ]; then
        [ -e "$root$directory" ] || cp -a "$directory" "$root$directory"
    else
        attach "$directory" "$directory"
    fi
done <"$image/directories"
attach "$image/opt" /opt
[ "$4" != home ] || attach /root /root
IFS=, read -ra pairs <<<"$mounts"
for pair in "${pairs[@]}"; do attach "${pair%%:*}" "${pair#*:}"; done
