package engine

import (
	"context"
	"time"
)

// settleTimeout is the time that recording finished work may take after the
// end of the deliveries.
const settleTimeout = 5 * time.Second

// scope is the time in which workers work. It ends in three steps, so that
// finished work is recorded even when the end comes in the middle of it:
// first no new batch is begun (soft), then deliveries are cancelled (hard),
// and settleTimeout later the work on the database.
type scope struct {
	soft, hard, db   context.Context
	endSoft, endHard context.CancelCauseFunc
	endDB            context.CancelFunc
}

// newScope returns a scope with ctx's values but not its end.
func newScope(ctx context.Context) *scope {
	base := context.WithoutCancel(ctx)
	s := &scope{}
	s.hard, s.endHard = context.WithCancelCause(base)
	s.soft, s.endSoft = context.WithCancelCause(s.hard)
	s.db, s.endDB = context.WithCancel(base)
	context.AfterFunc(s.hard, func() {
		t := time.AfterFunc(settleTimeout, s.endDB)
		context.AfterFunc(s.db, func() { t.Stop() })
	})
	return s
}

// stopping reports whether no new batch may be begun.
func (s *scope) stopping() bool { return s.soft.Err() != nil }

// stopWithin ends the scope softly, and after d hard.
func (s *scope) stopWithin(d time.Duration) {
	s.endSoft(ErrStopped)
	t := time.AfterFunc(d, func() { s.endHard(ErrStopped) })
	context.AfterFunc(s.hard, func() { t.Stop() })
}

// end ends the scope when all work in it is done.
func (s *scope) end() {
	s.endHard(ErrStopped)
	s.endDB()
}
