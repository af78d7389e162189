// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// func vfork(flags uintptr, l *launch) (pid, errno uintptr)
//
// The child goes on below this frame and never leaves it, so that the parent finds all above as it was.
TEXT ·vfork(SB), NOSPLIT, $8-32
	MOVQ flags+0(FP), DI
	XORL SI, SI
	XORL DX, DX
	XORL R10, R10
	XORL R8, R8
	MOVL $56, AX // clone
	SYSCALL
	CMPQ AX, $0xfffffffffffff001
	JCC  failed
	TESTQ AX, AX
	JNE  parent
	MOVQ l+8(FP), AX
	MOVQ AX, 0(SP)
	CALL ·becomeCommand(SB)
	INT  $3 // it does not return
parent:
	MOVQ AX, pid+16(FP)
	MOVQ $0, errno+24(FP)
	RET
failed:
	NEGQ AX
	MOVQ $-1, pid+16(FP)
	MOVQ AX, errno+24(FP)
	RET
