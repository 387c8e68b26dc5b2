#!/bin/sh
# Fetch the training text: Debian documentation packages, unpacked side by side.
# Usage: fetch_data.sh FOLDER     (Debian or Ubuntu; needs apt-get and dpkg, no root rights)
set -eu
folder=${1:?usage: fetch_data.sh FOLDER}
packages="python3.11-doc wordnet-base perl-doc sqlite3-doc postgresql-doc-15 python-django-doc"
mkdir -p "$folder/debs" "$folder/root"
cd "$folder/debs"
for package in $packages; do
    ls "$package"_*.deb >/dev/null 2>&1 || apt-get -q download "$package"
done
for deb in *.deb; do dpkg -x "$deb" ../root; done
for deb in *.deb; do
    printf '%s\t%s\t%s\n' "$(dpkg-deb -f "$deb" Package)" "$(dpkg-deb -f "$deb" Version)" "$(wc -c <"$deb")"
done >../packages.tsv
cat ../packages.tsv
