# sourced by main.sh, tp2.sh and pieces: folders and environment
N=/tmp/lease; RUN=$N/run; RES=$N/out; LOGS=$N/logs; FLAGS=$N/flags
mkdir -p $RUN $RES $LOGS $FLAGS /tmp/b
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# NVLink multicast stays off (KINDS.md); harmless on one GPU
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
[ -e $N/site_env.sh ] && source $N/site_env.sh
say() { echo "[$(date +%T)] $*"; }
