from dynamo_core.kv.chains import Load as Load
from dynamo_core.kv.chains import Rank as Rank
from dynamo_core.kv.chains import depths as depths
from dynamo_core.kv.chains import unshared_blocks as unshared_blocks
from dynamo_core.kv.hashes import SEED as SEED
from dynamo_core.kv.hashes import block_hashes as block_hashes
from dynamo_core.kv.hashes import sequence_hashes as sequence_hashes
from dynamo_core.kv.hashes import to_signed as to_signed
from dynamo_core.kv.hashes import to_unsigned as to_unsigned

__all__: list[str]
