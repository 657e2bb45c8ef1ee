from accelerate.recovery.groups import ReplicaGroups as ReplicaGroups
from accelerate.recovery.loader import RecoveryLoader as RecoveryLoader
from accelerate.recovery.session import Recovery as Recovery, open_recovery as open_recovery
