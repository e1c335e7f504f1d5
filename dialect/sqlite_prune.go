package dialect

import (
	"context"
	"fmt"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// pruneText deletes up to ?4 messages of the outbox ?1 that were delivered up
// to ?2 or dead up to ?3, the oldest of each first. A NULL time matches nothing.
const pruneText = `
DELETE FROM {messages} WHERE id IN (
	SELECT * FROM (SELECT id FROM {messages} INDEXED BY {delivered}
		WHERE outbox = ?1 AND status = 'delivered' AND delivered_at <= ?2 ORDER BY delivered_at LIMIT ?4)
	UNION ALL
	SELECT * FROM (SELECT id FROM {messages} INDEXED BY {dead_at}
		WHERE outbox = ?1 AND status = 'dead' AND dead_at <= ?3 ORDER BY dead_at LIMIT ?4)
	LIMIT ?4)`

// Prune implements engine.Storage. While another call prunes the same table it
// does nothing.
func (s *SQLite) Prune(ctx context.Context, q engine.PruneQuery) (int, error) {
	o, err := s.outbox(q.Outbox)
	if err != nil {
		return 0, err
	}
	if !o.pruning.TryLock() {
		return 0, nil
	}
	defer o.pruning.Unlock()
	now := s.micros()
	result, err := s.exec(ctx, o.prune, o.name, cutoff(now, q.Delivered), cutoff(now, q.Dead), q.Limit)
	if err != nil {
		return 0, fmt.Errorf("prune %s: %w", o.table.Messages(), err)
	}
	deleted, err := result.RowsAffected()
	return int(deleted), err
}

// cutoff is the latest time that is past its retention; NULL where everything
// stays.
func cutoff(now int64, retention time.Duration) any {
	if retention < 0 {
		return nil
	}
	return now - retention.Microseconds()
}
