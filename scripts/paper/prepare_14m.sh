#!/usr/bin/env bash
# The paper's pre-training data (table 2: SBU, VG, CC3M, CC12M; 14.23 M pairs then, about 9 to 10.5 M of them today).
#
#   CC3M_TSV=Train_GCC-training.tsv scripts/paper/prepare_14m.sh DATA_DIR
#
# Needs: a CPU core for every 100 pairs/s, 800 GB of disk (docs/datasets.md), access to the web; no GPU.
# Takes: about 12 hours on 8 cores if the network keeps up. Stop it at any time; called again it goes on.
# Ends with: table 2 beside the pairs fetched. The output is also in DATA_DIR/prepare_14m.log.
#
# CC3M_TSV names CC3M's list, whose download needs a sign-in, so that no script can fetch it. VG_SOURCE, SBU_SOURCE and
# CC12M_SOURCE name local files (see `zerovl data vg --help`), separated by spaces.
set -euo pipefail

if [[ $# -lt 1 || "$1" == -* ]]; then
    sed -n '2,12s/^# \{0,1\}//p' "$0"
    exit 2
fi
data=$1
if [[ -z "${CC3M_TSV:-}" ]]; then
    echo "CC3M_TSV is not set: get Train_GCC-training.tsv from ai.google.com/research/ConceptualCaptions and set CC3M_TSV to its path." >&2
    exit 2
fi
mkdir -p "$data"
exec > >(tee -a "$data/prepare_14m.log") 2>&1

# One dataset. Fails if it cannot be made.
make_set() {
    local name=$1
    shift
    echo "$(date '+%F %T') $name"
    zerovl data "$name" --out "$data/$name" --quiet "$@"
}

echo "$(date '+%F %T') begin: $data"
# One source after the other; a source that fails does not stop the others.
failures=()
# shellcheck disable=SC2086  # the variables hold lists of paths
{
    make_set vg ${VG_SOURCE:+--source $VG_SOURCE} || failures+=(vg)
    make_set cc3m --source "$CC3M_TSV" || failures+=(cc3m)
    make_set sbu ${SBU_SOURCE:+--source $SBU_SOURCE} || failures+=(sbu)
    make_set cc12m ${CC12M_SOURCE:+--source $CC12M_SOURCE} || failures+=(cc12m)
}
if ((${#failures[@]})); then
    echo "$(date '+%F %T') NOT DONE: ${failures[*]}; the reason is printed above; call this again to go on."
    exit 1
fi
echo "$(date '+%F %T') done. Train with:"
echo "  --train-data 'sbu=$data/sbu::vg=$data/vg::cc3m=$data/cc3m::cc12m=$data/cc12m' --train-data-upsampling-factors vg=5 --debiased-sampling"
