package dialect

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/gormoutbox/outbox/engine"
)

const (
	remapCount = `SELECT COALESCE((SELECT partitions FROM {meta} WHERE outbox = ?1), 1)`

	// The first lane after (?2, ?3) and below count ?4 that has a message.
	remapNext = `
SELECT partitions, partition FROM (
	SELECT * FROM (SELECT partitions, partition FROM {messages} INDEXED BY {ready}
		WHERE {after} AND status = 'pending' AND scheduled_at IS NULL ORDER BY 1, 2 LIMIT 1)
	UNION ALL
	SELECT * FROM (SELECT partitions, partition FROM {messages} INDEXED BY {due}
		WHERE {after} AND status = 'pending' AND scheduled_at IS NOT NULL ORDER BY 1, 2 LIMIT 1)
	UNION ALL
	SELECT * FROM (SELECT partitions, partition FROM {messages} INDEXED BY {dead}
		WHERE {after} AND status = 'dead' ORDER BY 1, 2 LIMIT 1)
) ORDER BY partitions, partition LIMIT 1`
	remapAfter = `outbox = ?1 AND partitions < ?4 AND (partitions, partition) > (?2, ?3)`

	// Up to ?4 messages of a lane.
	remapRows = `
SELECT id, group_key FROM {messages} INDEXED BY {ready} WHERE {lane} AND status = 'pending' AND scheduled_at IS NULL
UNION ALL
SELECT id, group_key FROM {messages} INDEXED BY {due} WHERE {lane} AND status = 'pending' AND scheduled_at IS NOT NULL
UNION ALL
SELECT id, group_key FROM {messages} INDEXED BY {dead} WHERE {lane} AND status = 'dead'
LIMIT ?4`

	remapMove = `UPDATE {messages} SET partitions = ?, partition = ? WHERE id IN `
)

type remapSQL struct{ count, next, rows, move string }

func newRemapSQL(names *strings.Replacer) remapSQL {
	lanes := strings.NewReplacer("{after}", remapAfter, "{lane}", fetchLane)
	return remapSQL{
		count: names.Replace(remapCount),
		next:  names.Replace(lanes.Replace(remapNext)),
		rows:  names.Replace(lanes.Replace(remapRows)),
		move:  names.Replace(remapMove),
	}
}

// Remap implements engine.Storage. Each lane is emptied in a short transaction
// of its own; ungrouped messages spread by their ids.
func (s *SQLite) Remap(ctx context.Context, outbox string, limit int) (moved int, more bool, err error) {
	o, err := s.outbox(outbox)
	if err != nil {
		return 0, false, err
	}
	moved, more, err = s.remap(ctx, o, limit)
	if err != nil {
		return moved, more, fmt.Errorf("remap %s: %w", o.table.Messages(), err)
	}
	return moved, more, nil
}

func (s *SQLite) remap(ctx context.Context, o *liteOutbox, limit int) (moved int, more bool, err error) {
	lane := engine.Lane{Outbox: o.name, Partition: -1}
	for {
		lane, err = s.nextStray(ctx, o, lane)
		if errors.Is(err, sql.ErrNoRows) {
			return moved, more, nil
		}
		if err != nil || moved >= limit {
			return moved, true, err
		}
		if !s.lanes.take(lane) {
			more = true
			continue
		}
		n, err := s.emptyLane(ctx, o, lane, limit-moved)
		s.lanes.release(lane)
		moved += n
		if err != nil {
			return moved, true, err
		}
		more = more || moved == limit
	}
}

// nextStray finds the next lane of a count that is not in force after the
// given one, in the order of count and number; sql.ErrNoRows if there is none.
func (s *SQLite) nextStray(ctx context.Context, o *liteOutbox, after engine.Lane) (next engine.Lane, err error) {
	next.Outbox = o.name
	err = retryBusy(ctx, func() error {
		var count int
		if err := s.db.QueryRowContext(ctx, o.remap.count, o.name).Scan(&count); err != nil {
			return err
		}
		if after.Partitions < count {
			err := s.scanLane(ctx, o, after, count, &next)
			if !errors.Is(err, sql.ErrNoRows) {
				return err
			}
		}
		if after.Partitions <= count {
			after.Partitions, after.Partition = count, math.MaxInt32
		}
		return s.scanLane(ctx, o, after, math.MaxInt32, &next)
	})
	return next, err
}

func (s *SQLite) scanLane(ctx context.Context, o *liteOutbox, after engine.Lane, below int, next *engine.Lane) error {
	return s.db.QueryRowContext(ctx, o.remap.next, o.name, after.Partitions, after.Partition, below).
		Scan(&next.Partitions, &next.Partition)
}

// emptyLane moves up to limit messages of the lane to where they belong under
// the count in force.
func (s *SQLite) emptyLane(ctx context.Context, o *liteOutbox, lane engine.Lane, limit int) (moved int, err error) {
	err = s.write(ctx, func(c *sql.Conn) error {
		moved = 0
		var count int
		if err := c.QueryRowContext(ctx, o.remap.count, o.name).Scan(&count); err != nil {
			return fmt.Errorf("read the partition count: %w", err)
		}
		if count == lane.Partitions {
			return nil
		}
		targets, err := remapTargets(ctx, c, o, lane, count, limit)
		if err != nil {
			return fmt.Errorf("read a lane: %w", err)
		}
		for partition, ids := range targets {
			if len(ids) == 0 {
				continue
			}
			if _, err := c.ExecContext(ctx, o.remap.move+idList(ids), count, partition); err != nil {
				return fmt.Errorf("move to partition %d: %w", partition, err)
			}
			moved += len(ids)
		}
		return nil
	})
	return moved, err
}

// remapTargets reads the lane and gives the ids by the partition they go to.
func remapTargets(ctx context.Context, c *sql.Conn, o *liteOutbox, lane engine.Lane, count, limit int) ([][]int64, error) {
	found, err := c.QueryContext(ctx, o.remap.rows, lane.Outbox, lane.Partitions, lane.Partition, limit)
	if err != nil {
		return nil, err
	}
	defer found.Close()
	targets := make([][]int64, count)
	for found.Next() {
		var id int64
		var group sql.NullString
		if err := found.Scan(&id, &group); err != nil {
			return nil, err
		}
		hash := uint64(id)
		if group.Valid {
			hash = engine.GroupHash(group.String)
		}
		p := engine.Partition(hash, count)
		targets[p] = append(targets[p], id)
	}
	return targets, found.Err()
}
