package dialect

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gormoutbox/outbox/engine"
)

// A delivered message is settled whatever has become of it since it was
// fetched; a failed one only if its attempts are still what they were, so that
// a failure is charged once.
const (
	settleDelete = `DELETE FROM {messages} WHERE outbox = ? AND id IN `
	settleKeep   = `UPDATE {messages} SET status = 'delivered', delivered_at = ?, dead_at = NULL, scheduled_at = NULL
WHERE status <> 'delivered' AND outbox = ? AND id IN `
	settleFail = `UPDATE {messages} SET attempts = attempts + 1, due_at = CASE WHEN attempts = 0 THEN COALESCE(due_at, scheduled_at) ELSE due_at END, scheduled_at = ?, last_error = ?
WHERE id = ? AND outbox = ? AND attempts = ? AND status = 'pending'`
	settleKill = `UPDATE {messages} SET attempts = attempts + 1, scheduled_at = NULL, last_error = ?,
	status = 'dead', dead_at = ?
WHERE id = ? AND outbox = ? AND attempts = ? AND status = 'pending'`
)

type settleSQL struct{ del, keep, fail, kill string }

func newSettleSQL(names *strings.Replacer) settleSQL {
	return settleSQL{
		del:  names.Replace(settleDelete),
		keep: names.Replace(settleKeep),
		fail: names.Replace(settleFail),
		kill: names.Replace(settleKill),
	}
}

// idChunk is the most ids that one statement lists: the text stays far below
// SQLite's bound of a million bytes.
const idChunk = 1000

// Settle implements engine.Storage.
func (s *SQLite) Settle(ctx context.Context, outbox string, settlement engine.Settlement) error {
	o, err := s.outbox(outbox)
	if err != nil {
		return err
	}
	if err := s.settle(ctx, o, settlement); err != nil {
		return fmt.Errorf("settle in %s: %w", o.table.Messages(), err)
	}
	return nil
}

// settle applies the settlement at once or not at all. The ordinary one, where
// everything was delivered, is a single statement that needs no transaction
// around it.
func (s *SQLite) settle(ctx context.Context, o *liteOutbox, settlement engine.Settlement) error {
	if settlement.Empty() {
		return nil
	}
	work := liteSettlement{Settlement: settlement, outbox: o, now: s.micros()}
	if len(work.Failed)+len(work.Dead) == 0 && len(work.Delivered) <= idChunk {
		text, args := work.delivered(work.Delivered)
		_, err := s.exec(ctx, text, args...)
		return err
	}
	return s.write(ctx, func(c *sql.Conn) error { return work.apply(ctx, c) })
}

type liteSettlement struct {
	engine.Settlement
	outbox *liteOutbox
	now    int64
}

func (w *liteSettlement) apply(ctx context.Context, c *sql.Conn) error {
	for ids := range slices.Chunk(w.Delivered, idChunk) {
		text, args := w.delivered(ids)
		if _, err := c.ExecContext(ctx, text, args...); err != nil {
			return fmt.Errorf("record %d delivered messages: %w", len(ids), err)
		}
	}
	for _, f := range w.Failed {
		due := w.now + max(f.Delay.Microseconds(), 0)
		if _, err := c.ExecContext(ctx, w.outbox.settle.fail, due, f.Error, f.ID, w.outbox.name, f.Attempts); err != nil {
			return fmt.Errorf("record the failure of message %d: %w", f.ID, err)
		}
	}
	for _, f := range w.Dead {
		if _, err := c.ExecContext(ctx, w.outbox.settle.kill, f.Error, w.now, f.ID, w.outbox.name, f.Attempts); err != nil {
			return fmt.Errorf("record that message %d is dead: %w", f.ID, err)
		}
	}
	return nil
}

// delivered gives the statement that settles delivered messages.
func (w *liteSettlement) delivered(ids []int64) (text string, args []any) {
	if w.Keep {
		return w.outbox.settle.keep + idList(ids), []any{w.now, w.outbox.name}
	}
	return w.outbox.settle.del + idList(ids), []any{w.outbox.name}
}

// idList writes ids as they stand after IN. Constants take less time than
// arguments, and SQLite prepares a statement for each use anyway.
func idList(ids []int64) string {
	b := make([]byte, 0, 2+8*len(ids))
	sep := byte('(')
	for _, id := range ids {
		b = append(b, sep)
		b = strconv.AppendInt(b, id, 10)
		sep = ','
	}
	if len(ids) == 0 {
		b = append(b, '(')
	}
	return string(append(b, ')'))
}
