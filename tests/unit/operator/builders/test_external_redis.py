"""URLs of an existing Redis: what the schema takes has a meaning, and pods may reach its ports."""

import msgspec
import pytest

from tandem_operator.api.model_service import ExternalRedis
from tandem_operator.builders.redis import redis_ports
from tandem_services.common.redis_url import RedisUrl


@pytest.mark.parametrize(
    ("url", "ports"),
    [
        ("redis://r", [6379]),
        ("rediss://user@r:6380/2", [6380]),
        ("redis+cluster://r:7000,[fd00::1]:7001", [7000, 7001, 6379]),
        ("rediss+sentinel://user@a,b:26380/main/1", [26379, 26380, 6379]),
        ("redis+cluster://a,[fd00::1],b:65535", [6379, 6379, 65535, 6379]),
    ],
)
def test_pods_may_reach_the_ports_of_a_redis(url, ports):
    external = msgspec.convert({"url": url}, ExternalRedis)
    assert RedisUrl.parse(external.url).addresses
    assert redis_ports(external) == ports


@pytest.mark.parametrize(
    "url",
    [
        *("redis://a,b", "redis://r/main", "redis+cluster://r/1", "redis+sentinel://r", "redis+sentinel://r/main/x"),
        *("http://r", "redis://user:password@r", "redis://r?db=1", "redis://r:port", "redis://r:65536", "redis://r:0"),
        *("redis://fd00::1:6379", "redis://[fd00::1", "redis+sentinel://a,b:/main"),
    ],
)
def test_schema_refuses_a_url_of_redis_that_has_no_meaning(url):
    with pytest.raises(msgspec.ValidationError, match=r"url"):
        msgspec.convert({"url": url}, ExternalRedis)
