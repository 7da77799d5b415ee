#!/usr/bin/env bash
# Prepare an AWS account for weft's jobs on SageMaker, and remove it all again: docs/aws-first-day.md.
#
#   scripts/aws_first_day.sh [--dry-run] STEP...
#
#   quota        print and request the quota of the instance type
#   bucket       the bucket for data, recipes and checkpoints
#   role         the role of the jobs, with docs/aws/job-policy.json
#   image        build docker/Dockerfile and push it to ECR
#   network      VPC, subnet, security group, gateway endpoint for S3
#   filesystem   FSx for Lustre, linked to s3://BUCKET/data
#   data         copy $DATA (a directory) to the bucket
#   recipe       write mine.toml, for weft launch
#   status       jobs, file system and bucket of this name
#   cost         what the account paid per day and service
#   teardown     delete all of the above except the bucket; with DELETE_BUCKET=yes the bucket, too
#
# --dry-run prints the commands and runs none.  Settings are variables of the environment:
#
#   NAME=weft  REGION=us-east-1  ZONE_ID=use1-az4  BUCKET=NAME-ACCOUNT-REGION
#   INSTANCE=ml.p5.48xlarge  NODES=2  STORAGE=4800 (GiB)  DATA=data  MODEL=llama3-8b
#
# The ids of what exists are kept in $NAME-aws.env, and a step that finds its id there does nothing.
# A step that failed can be started again.  No step was run on AWS: docs/aws-first-day.md.
set -euo pipefail
shopt -s inherit_errexit

: "${NAME:=weft}" "${REGION:=us-east-1}" "${ZONE_ID:=use1-az4}" "${INSTANCE:=ml.p5.48xlarge}"
: "${NODES:=2}" "${STORAGE:=4800}" "${DATA:=data}" "${MODEL:=llama3-8b}" "${DELETE_BUCKET:=no}"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
state=$PWD/$NAME-aws.env
dry_run=no
export AWS_REGION=$REGION AWS_DEFAULT_REGION=$REGION AWS_PAGER=

say() { echo "# $*" >&2; }

# Print a command that a shell can read.
print() {
    local word line=
    for word; do
        [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
        line+="$word "
    done
    echo "${line% }"
}

run() { if [ "$dry_run" = yes ]; then print "$@"; else "$@"; fi; }

# Run a command and keep its output as an id: keep VARIABLE PLACEHOLDER COMMAND...
keep() {
    local name=$1 placeholder=$2 value
    shift 2
    if [ -n "${!name:-}" ]; then
        say "$name=${!name} exists"
    elif [ "$dry_run" = yes ]; then
        [ "$1" = echo ] || print "$@"
        printf -v "$name" %s "$placeholder"
    else
        value=$("$@")
        [ -n "$value" ] && [ "$value" != None ] || { say "no value of $name"; exit 1; }
        printf -v "$name" %s "$value"
        echo "$name=$value" >>"$state"
        say "$name=$value"
    fi
}

forget() { if [ "$dry_run" = no ]; then sed -i "/^$1=/d" "$state"; fi; unset "$1"; }

# Tags of EC2: all that this script makes has the tag weft=NAME.
tags() { echo "[{\"ResourceType\": \"$1\", \"Tags\": [{\"Key\": \"weft\", \"Value\": \"$NAME\"}]}]"; }

fill() { sed -e "s/ACCOUNT/$ACCOUNT/; s/REGION/$REGION/; s/BUCKET/$BUCKET/; s/NAME/$NAME/" "$1"; }

wait_for() { # DESIRED COMMAND...
    local desired=$1 value
    shift
    if [ "$dry_run" = yes ]; then
        print "$@"
        return
    fi
    for _ in $(seq 120); do
        value=$("$@")
        case $value in
            "$desired") return ;;
            FAILED | MISCONFIGURED*) break ;;
        esac
        sleep "${POLL_SECONDS:-30}"
    done
    say "$* is $value, not $desired"
    exit 1
}

quota() {
    local code quota="${INSTANCE} for training job usage"
    run aws service-quotas list-service-quotas --service-code sagemaker --output table \
        --query "Quotas[?QuotaName=='$quota'].[QuotaCode,QuotaName,Value]"
    if [ "$dry_run" = yes ]; then
        code=L-00000000
    else
        code=$(aws service-quotas list-service-quotas --service-code sagemaker --output text \
            --query "Quotas[?QuotaName=='$quota' && Value<\`$NODES\`].QuotaCode")
    fi
    [ -z "$code" ] || run aws service-quotas request-service-quota-increase \
        --service-code sagemaker --quota-code "$code" --desired-value "$NODES"
}

bucket() {
    local place=()
    [ "$REGION" = us-east-1 ] ||
        place=(--create-bucket-configuration "{\"LocationConstraint\": \"$REGION\"}")
    if [ "$dry_run" = yes ] || ! aws s3api head-bucket --bucket "$BUCKET" >/dev/null 2>&1; then
        run aws s3api create-bucket --bucket "$BUCKET" "${place[@]}"
    fi
    run aws s3api put-public-access-block --bucket "$BUCKET" \
        --public-access-block-configuration '{"BlockPublicAcls": true, "IgnorePublicAcls": true, "BlockPublicPolicy": true, "RestrictPublicBuckets": true}'
    # Parts of uploads that a lost node did not complete cost money.
    run aws s3api put-bucket-lifecycle-configuration --bucket "$BUCKET" \
        --lifecycle-configuration '{"Rules": [{"ID": "parts", "Status": "Enabled", "Filter": {"Prefix": ""}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2}}]}'
}

role() {
    keep ROLE "arn:aws:iam::$ACCOUNT:role/$NAME" aws iam create-role --role-name "$NAME" \
        --tags "[{\"Key\": \"weft\", \"Value\": \"$NAME\"}]" \
        --assume-role-policy-document '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}]}' \
        --query Role.Arn --output text
    run aws iam put-role-policy --role-name "$NAME" --policy-name job \
        --policy-document "$(fill "$root/docs/aws/job-policy.json")"
}

show_image() { # TAG
    run aws ecr describe-images --repository-name "$NAME" --image-ids "[{\"imageTag\": \"$1\"}]" \
        --query 'imageDetails[].[imageTags[0],imageSizeInBytes]' --output text
}

image() {
    local registry=$ACCOUNT.dkr.ecr.$REGION.amazonaws.com tag
    tag=$(git -C "$root" rev-parse --short=12 HEAD)
    keep REPOSITORY "$registry/$NAME" aws ecr create-repository --repository-name "$NAME" \
        --image-tag-mutability IMMUTABLE --query repository.repositoryUri --output text
    if [ "$dry_run" = yes ]; then
        echo "aws ecr get-login-password | docker login --username AWS --password-stdin $registry"
    else
        aws ecr get-login-password | docker login --username AWS --password-stdin "$registry"
    fi
    if [ "$dry_run" = yes ] || ! show_image "$tag" 2>/dev/null; then
        run docker build --file "$root/docker/Dockerfile" --tag "$REPOSITORY:$tag" "$root"
        run docker push "$REPOSITORY:$tag"
        show_image "$tag"
    fi
    [ -z "${IMAGE:-}" ] || forget IMAGE # of another commit
    keep IMAGE "$REPOSITORY:$tag" echo "$REPOSITORY:$tag"
}

network() {
    keep VPC vpc-0123456789abcdef0 aws ec2 create-vpc --cidr-block 10.0.0.0/16 \
        --tag-specifications "$(tags vpc)" --query Vpc.VpcId --output text
    run aws ec2 modify-vpc-attribute --vpc-id "$VPC" --enable-dns-hostnames '{"Value": true}'
    # All nodes and the file system are in one subnet: EFA does not leave it, and FSx charges for
    # traffic between zones.  Each p5 needs 5 addresses or more.
    keep SUBNET subnet-0123456789abcdef0 aws ec2 create-subnet --vpc-id "$VPC" \
        --cidr-block 10.0.0.0/20 --availability-zone-id "$ZONE_ID" \
        --tag-specifications "$(tags subnet)" --query Subnet.SubnetId --output text
    keep ROUTES rtb-0123456789abcdef0 aws ec2 describe-route-tables \
        --filters "[{\"Name\": \"vpc-id\", \"Values\": [\"$VPC\"]}]" \
        --query 'RouteTables[0].RouteTableId' --output text
    keep ENDPOINT vpce-0123456789abcdef0 aws ec2 create-vpc-endpoint --vpc-id "$VPC" \
        --vpc-endpoint-type Gateway --service-name "com.amazonaws.$REGION.s3" \
        --route-table-ids "$ROUTES" --tag-specifications "$(tags vpc-endpoint)" \
        --query VpcEndpoint.VpcEndpointId --output text
    keep GROUP sg-0123456789abcdef0 aws ec2 create-security-group --vpc-id "$VPC" \
        --group-name "$NAME" --description "nodes and file system of $NAME" \
        --tag-specifications "$(tags security-group)" --query GroupId --output text
    # EFA and Lustre need all traffic from and to the group itself; 0.0.0.0/0 does not count for EFA.
    local self="[{\"IpProtocol\": \"-1\", \"UserIdGroupPairs\": [{\"GroupId\": \"$GROUP\"}]}]"
    keep INGRESS sgr-0123456789abcdef0 aws ec2 authorize-security-group-ingress \
        --group-id "$GROUP" --ip-permissions "$self" \
        --query 'SecurityGroupRules[0].SecurityGroupRuleId' --output text
    keep EGRESS sgr-0123456789abcdef1 aws ec2 authorize-security-group-egress \
        --group-id "$GROUP" --ip-permissions "$self" \
        --query 'SecurityGroupRules[0].SecurityGroupRuleId' --output text
}

filesystem() {
    : "${SUBNET:?run the step network first}" "${GROUP:?run the step network first}"
    keep FILESYSTEM fs-0123456789abcdef0 aws fsx create-file-system --file-system-type LUSTRE \
        --file-system-type-version 2.15 --storage-type SSD --storage-capacity "$STORAGE" \
        --subnet-ids "$SUBNET" --security-group-ids "$GROUP" \
        --tags "[{\"Key\": \"weft\", \"Value\": \"$NAME\"}]" \
        --lustre-configuration '{"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 250, "DataCompressionType": "LZ4", "MetadataConfiguration": {"Mode": "AUTOMATIC"}}' \
        --query FileSystem.FileSystemId --output text
    wait_for AVAILABLE aws fsx describe-file-systems --file-system-ids "$FILESYSTEM" \
        --query 'FileSystems[0].Lifecycle' --output text
    keep MOUNT abcdefgh aws fsx describe-file-systems --file-system-ids "$FILESYSTEM" \
        --query 'FileSystems[0].LustreConfiguration.MountName' --output text
    keep LINK dra-0123456789abcdef0 aws fsx create-data-repository-association \
        --file-system-id "$FILESYSTEM" --file-system-path /data \
        --data-repository-path "s3://$BUCKET/data" --batch-import-meta-data-on-create \
        --s3 '{"AutoImportPolicy": {"Events": ["NEW", "CHANGED", "DELETED"]}}' \
        --query Association.AssociationId --output text
    wait_for AVAILABLE aws fsx describe-data-repository-associations --association-ids "$LINK" \
        --query 'Associations[0].Lifecycle' --output text
}

data() { run aws s3 sync "$DATA" "s3://$BUCKET/data"; }

recipe() {
    local file=mine.toml
    : "${ROLE:?run the step role first}" "${IMAGE:?run the step image first}"
    : "${FILESYSTEM:?run the step filesystem first}" "${MOUNT:?}" "${SUBNET:?}" "${GROUP:?}"
    [ "$dry_run" = no ] || file=/dev/stdout
    cat >"$file" <<TOML
extends = "$MODEL"

[data]
path = "/fsx/data/web"
tokenizer = "/fsx/data/tokenizer.json"
cache_dir = "/fsx/cache"

[checkpoint]
dir = "/fsx/runs/mine/checkpoints"
interval = "auto"

[launch]
image = "$IMAGE"
role = "$ROLE"
instance_type = "$INSTANCE"
bucket = "s3://$BUCKET"
region = "$REGION"
subnets = ["$SUBNET"]
security_groups = ["$GROUP"]
labels = {weft = "$NAME"}

[launch.mounts]
"/fsx" = "fsx:$FILESYSTEM:/$MOUNT"
TOML
    [ "$dry_run" = yes ] || say "wrote $file"
}

status() {
    run aws sagemaker list-training-jobs --status-equals InProgress --output table \
        --query 'TrainingJobSummaries[].[TrainingJobName,CreationTime]'
    run aws fsx describe-file-systems --output table \
        --query "FileSystems[?Tags[?Key=='weft' && Value=='$NAME']].[FileSystemId,Lifecycle,StorageCapacity]"
    run aws s3 ls "s3://$BUCKET" --recursive --summarize
}

cost() {
    run aws ce get-cost-and-usage --granularity DAILY --metrics UnblendedCost \
        --time-period "{\"Start\": \"$(date -d '7 days ago' +%F)\", \"End\": \"$(date +%F)\"}" \
        --group-by '[{"Type": "DIMENSION", "Key": "SERVICE"}]' --output table \
        --query 'ResultsByTime[].Groups[].[Keys[0],Metrics.UnblendedCost.Amount]'
}

# Delete what one variable names: drop VARIABLE COMMAND...
drop() {
    local name=$1
    shift
    [ -n "${!name:-}" ] || { say "no $name"; return; }
    run "$@"
    forget "$name"
}

teardown() {
    if [ "$dry_run" = yes ]; then
        LINK=dra-0123456789abcdef0 FILESYSTEM=fs-0123456789abcdef0 ENDPOINT=vpce-0123456789abcdef0
        GROUP=sg-0123456789abcdef0 SUBNET=subnet-0123456789abcdef0 VPC=vpc-0123456789abcdef0
        REPOSITORY=$NAME ROLE=$NAME
    fi
    if [ -n "${FILESYSTEM:-}" ]; then
        # Checkpoints below /fsx/runs are lost with it.
        unset LINK MOUNT
        drop FILESYSTEM aws fsx delete-file-system --file-system-id "$FILESYSTEM"
        [ "$dry_run" = yes ] || sed -i '/^LINK=/d; /^MOUNT=/d' "$state"
        wait_for 0 aws fsx describe-file-systems --output text \
            --query "length(FileSystems[?Tags[?Key=='weft' && Value=='$NAME']])"
    fi
    drop ENDPOINT aws ec2 delete-vpc-endpoints --vpc-endpoint-ids "${ENDPOINT:-}"
    drop GROUP aws ec2 delete-security-group --group-id "${GROUP:-}"
    drop SUBNET aws ec2 delete-subnet --subnet-id "${SUBNET:-}"
    drop VPC aws ec2 delete-vpc --vpc-id "${VPC:-}"
    drop REPOSITORY aws ecr delete-repository --repository-name "$NAME" --force
    [ -z "${ROLE:-}" ] || run aws iam delete-role-policy --role-name "$NAME" --policy-name job
    drop ROLE aws iam delete-role --role-name "$NAME"
    if [ "$DELETE_BUCKET" = yes ]; then
        run aws s3 rb "s3://$BUCKET" --force
    fi
    [ "$dry_run" = yes ] || rm -f "$state"
}

if [ "${1:-}" = --dry-run ]; then
    dry_run=yes
    shift
fi
[ $# -gt 0 ] || { sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"; exit 2; }
for step; do
    case $step in
        quota | bucket | role | image | network | filesystem | data | recipe | status | cost | teardown) ;;
        *)
            say "no step $step"
            exit 2
            ;;
    esac
done
# shellcheck source=/dev/null
if [ "$dry_run" = no ] && [ -e "$state" ]; then . "$state"; fi
keep ACCOUNT 123456789012 aws sts get-caller-identity --query Account --output text
: "${BUCKET:=$NAME-$ACCOUNT-$REGION}"
for step; do
    say "$step"
    "$step"
done
