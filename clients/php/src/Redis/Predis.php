<?php

declare(strict_types=1);

namespace Tidegate\Redis;

use Predis\ClientInterface;
use Predis\Command\RawCommand;
use Predis\CommunicationException;
use Predis\Connection\AggregateConnectionInterface;
use Predis\Connection\NodeConnectionInterface;
use Predis\NotSupportedException;
use Predis\PredisException;
use Predis\Response\ErrorInterface;
use Predis\Response\ServerException;
use Tidegate\Exception\Unavailable;

/**
 * Predis. It closes its connection after an error and opens it again for the next command.
 *
 * On a Redis Cluster, Predis repeats a command whose connection was lost, although it may have been executed. So a
 * command is sent on the connection to its node. A node that redirects it has not executed it; Predis then follows the
 * redirection.
 *
 * @internal
 */
final class Predis implements Connection
{
    public function __construct(private readonly ClientInterface $client)
    {
    }

    public function send(array $command, float $seconds): mixed
    {
        $raw = RawCommand::create(...$command);
        $connection = $node = null;
        try {
            $connection = $this->client->getConnection();
            $node = $connection instanceof AggregateConnectionInterface ? $connection->getConnection($raw) : $connection;
            self::setTimeout($node, $seconds);
            $isCluster = self::isRedisCluster($connection);
            $reply = $isCluster ? $node->executeCommand($raw) : $this->client->executeCommand($raw);
            if ($isCluster && $reply instanceof ErrorInterface && in_array($reply->getErrorType(), ['MOVED', 'ASK'], true)) {
                $reply = $this->client->executeCommand($raw);
            }
        } catch (ServerException $exception) {
            throw new ErrorReply($exception->getMessage(), 0, $exception);
        } catch (NotSupportedException) {
            // Predis finds the slots of the keys itself.
            throw new ErrorReply('CROSSSLOT');
        } catch (PredisException $exception) {
            // Another node may have its slots by now. The last node is kept: Predis needs one to find the others.
            if (self::isRedisCluster($connection) && $exception instanceof CommunicationException && $exception->getConnection() === $node && count($connection) > 1) {
                $connection->remove($node);
            }
            throw new Unavailable(sprintf('Redis did not answer within %g ms: %s', 1000 * $seconds, $exception->getMessage()), 0, $exception);
        } finally {
            self::restoreTimeout($node);
        }
        if ($reply instanceof ErrorInterface) {
            throw new ErrorReply($reply->getMessage());
        }
        return $reply;
    }

    /**
     * Returns whether this is a connection to a Redis Cluster, not to servers among which Predis distributes keys itself.
     * The class has another name since Predis 2.
     */
    private static function isRedisCluster(mixed $connection): bool
    {
        return $connection instanceof \Predis\Connection\Aggregate\RedisCluster || $connection instanceof \Predis\Connection\Cluster\RedisCluster;
    }

    private static function setTimeout(mixed $node, float $seconds): void
    {
        if (!$node instanceof NodeConnectionInterface) {
            return;
        }
        $stream = $node->getResource(); // connects if it is not connected
        if (is_resource($stream)) {
            stream_set_timeout($stream, (int) $seconds, (int) (1_000_000 * fmod($seconds, 1.0)));
        }
    }

    /** Sets the timeout of the connection's parameters, or that of PHP. A connection that is closed gets its own. */
    private static function restoreTimeout(mixed $node): void
    {
        if ($node instanceof NodeConnectionInterface && $node->isConnected()) {
            $timeout = (float) ($node->getParameters()->read_write_timeout ?? ini_get('default_socket_timeout'));
            self::setTimeout($node, $timeout > 0 ? $timeout : 31_536_000.0);
        }
    }
}
