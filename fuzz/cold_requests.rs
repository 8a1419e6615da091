//! The requests that the `kafka-protocol` crate decodes for us, by API key: the one list that the fuzz
//! targets and the tests of the kafka crate go through. Each of them fails on an advertised key that is
//! missing here.

/// Calls `$then! { $($with)* 2 ListOffsetsRequest, 3 MetadataRequest, ... }`.
macro_rules! with_cold_requests {
    ($then:ident! { $($with:tt)* }) => {
        $then! {
            $($with)*
            2 ListOffsetsRequest,
            3 MetadataRequest,
            8 OffsetCommitRequest,
            9 OffsetFetchRequest,
            10 FindCoordinatorRequest,
            11 JoinGroupRequest,
            12 HeartbeatRequest,
            13 LeaveGroupRequest,
            14 SyncGroupRequest,
            15 DescribeGroupsRequest,
            16 ListGroupsRequest,
            18 ApiVersionsRequest,
            19 CreateTopicsRequest,
            20 DeleteTopicsRequest,
            21 DeleteRecordsRequest,
            22 InitProducerIdRequest,
            23 OffsetForLeaderEpochRequest,
            32 DescribeConfigsRequest,
            33 AlterConfigsRequest,
            35 DescribeLogDirsRequest,
            37 CreatePartitionsRequest,
            42 DeleteGroupsRequest,
            44 IncrementalAlterConfigsRequest,
            47 OffsetDeleteRequest,
            60 DescribeClusterRequest,
            74 ListConfigResourcesRequest,
            75 DescribeTopicPartitionsRequest,
        }
    };
}
