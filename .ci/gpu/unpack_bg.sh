#!/bin/bash
# Unpacks the bundle into /tmp/site (flag: unpacked). Started with setsid by the call that brings the bundle's last piece.
source /tmp/lease/env.sh
cd /tmp
if [ ! -e $FLAGS/unpacked ]; then
  rm -rf /tmp/site /tmp/site.new; mkdir /tmp/site.new
  cat /tmp/b/bundle.[0-9]* | xz -dc -T0 | tar xf - -C /tmp/site.new && mv /tmp/site.new/site /tmp/site && touch $FLAGS/unpacked
fi
say "unpacked: $(ls $FLAGS/unpacked 2>&1) $(du -sh /tmp/site | cut -f1)"
